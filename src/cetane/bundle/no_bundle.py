"""What a path is that is no bundle, and what to do about it."""

import shlex
from pathlib import Path

from cetane.errors import CetaneError
from cetane.files import PARTIAL
from cetane.schema.manifest import EXPORTS, MANIFEST

MODEL_FILES = (".gguf", ".safetensors")


def no_bundle(path: Path) -> CetaneError:
    """The error for a path without a bundle: it says what is there, and what to do."""
    if any((path / name).is_file() for name in EXPORTS) or any(path.glob("*/*.onnx")):
        return CetaneError(f"{path}: an export, not a bundle", "give the bundle that was exported")
    if (path / "kit.json").is_file() or (path.suffix == ".zip" and path.is_file()):
        return CetaneError(f"{path}: a kit, not a bundle", "give a bundle that the kit was made of")
    if (path / "config.json").is_file() or (path.suffix in MODEL_FILES and path.is_file()):
        hint = f"port it first: {shlex.join(['cetane', 'port', str(path)])}"
        return CetaneError(f"{path}: a model, not a bundle", hint)
    what = f"no {MANIFEST}, so not a complete bundle" if path.exists() else "no such bundle"
    hint = "give the folder of a bundle; cetane port MODEL makes one"
    unfinished = path if path.name.endswith(PARTIAL) else Path(f"{path}{PARTIAL}")
    if unfinished.is_dir():
        hint = "run the same cetane port again: it continues where it stopped"
    return CetaneError(f"{path}: {what}", hint)
