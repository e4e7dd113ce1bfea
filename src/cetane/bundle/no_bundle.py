"""What a path is that is no bundle, and what to do about it."""

import shlex
from pathlib import Path

from cetane.errors import CetaneError
from cetane.files import PARTIAL, is_file
from cetane.schema.manifest import EXPORTS, MANIFEST

MODEL_FILES = (".gguf", ".safetensors")


def refuse_no_bundle(path: Path) -> None:
    """Raise CetaneError for a path without a manifest: it says what is there, and what to do."""
    if is_file(path / MANIFEST):
        return
    if any((path / name).is_file() for name in EXPORTS) or any(path.glob("*/*.onnx")):
        raise CetaneError(f"{path}: an export, not a bundle", "give the bundle that was exported")
    if (path / "kit.json").is_file() or (path.suffix == ".zip" and path.is_file()):
        raise CetaneError(f"{path}: a kit, not a bundle", "give a bundle that the kit was made of")
    if (path / "config.json").is_file() or (path.suffix in MODEL_FILES and path.is_file()):
        hint = f"port it first: {shlex.join(['cetane', 'port', str(path)])}"
        raise CetaneError(f"{path}: a model, not a bundle", hint)
    what = f"no {MANIFEST}, so not a complete bundle" if path.exists() else "no such bundle"
    hint = "give the folder of a bundle; cetane port MODEL makes one"
    unfinished = path if path.name.endswith(PARTIAL) else Path(f"{path}{PARTIAL}")
    if unfinished.is_dir():
        hint = "run the same cetane port again: it continues where it stopped"
    raise CetaneError(f"{path}: {what}", hint)
