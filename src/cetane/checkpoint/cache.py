"""Where cetane keeps what it can always make again."""

import os
import tempfile
from contextlib import suppress
from pathlib import Path


def cache_dir() -> Path:
    """`$CETANE_CACHE`, else `$XDG_CACHE_HOME/cetane`, else `~/.cache/cetane`; may not exist yet."""
    if own := os.environ.get("CETANE_CACHE"):
        return Path(own)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "cetane"
    return Path.home() / ".cache" / "cetane"


def write_cache(path: Path, text: str) -> None:
    """Put `text` at `path` in one step; a cache that cannot be written is no error."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=".", delete=False
        ) as file:
            temporary = Path(file.name)
            try:
                file.write(text)
                file.close()
                temporary.replace(path)
            except OSError:
                temporary.unlink(missing_ok=True)
