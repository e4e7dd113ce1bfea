"""The way to open a checkpoint: a folder, a file, or a model on the Hugging Face hub."""

import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from cetane.checkpoint.adapted import with_adapters, with_lora
from cetane.checkpoint.checkpoint import Checkpoint
from cetane.checkpoint.gguf import GGUFCheckpoint
from cetane.checkpoint.gguf.file import MAGIC
from cetane.checkpoint.hub import download, downloaded
from cetane.checkpoint.names import HUB_ID
from cetane.checkpoint.safetensors import SafetensorsCheckpoint
from cetane.checkpoint.safetensors_files import refuse_pickle, shard_of_name
from cetane.errors import CetaneError
from cetane.files import is_file, open_regular

_WEIGHT_FILE = re.compile(r".*\.(gguf|safetensors|bin|pth?|ckpt|pkl)", re.IGNORECASE)
KINDS = "a folder, a .gguf file, or a hub id like org/name"


def open_checkpoint(
    source: str | Path,
    lora: str | Path | None = None,
    adapters: Mapping[str, str | Path] | None = None,
    *,
    connect: bool = True,
) -> Checkpoint:
    """Open a folder, a .safetensors or .gguf file, a hub id such as "org/name", or a folder's URL.

    An existing path wins over a hub id. Only headers are read, and torch is not loaded. One
    exception: if the config ties a head to the embedding, but both are stored, they are compared.
    The tensors at a URL are read by byte range.

    Without `connect`, only what is on this machine is opened: no URL, and a hub model only from the
    hub's cache. That is for sources that a file names, not the user.

    `lora` is the folder of a peft adapter that is merged into the tensors. `adapters` are folders
    of adapters that stay beside them, by name.

    Raises CetaneError if nothing is there, or if it is broken, unsupported or unsafe, and for an
    adapter that does not fit.
    """
    opened = open_base(source, connect)
    if lora is not None:
        opened = with_lora(opened, lora)
    return with_adapters(opened, adapters) if adapters else opened


def open_base(source: str | Path, connect: bool = True) -> Checkpoint:
    """Open a checkpoint without adapters; `connect` as in `open_checkpoint`."""
    if source == "":  # a path of no name is the current folder
        raise CetaneError("the model has no name", f"give {KINDS}")
    if "://" in str(source):
        if not connect:
            raise CetaneError(f"{source} is a URL, which is opened only if you name it")
        from cetane.checkpoint.remote import RemoteCheckpoint

        return RemoteCheckpoint.at(str(source))
    try:
        path = Path(source).expanduser()
    except RuntimeError:  # `~name` of an unknown user may still be a file
        path = Path(source)
    if is_file(path):
        return _open_file(path)
    if path.is_dir():
        return SafetensorsCheckpoint.open(path)
    if path.exists():  # a pipe or a device: reading it may block or never end
        raise CetaneError(f"{path} is not a regular file", f"give {KINDS}")
    name = str(source)
    if is_remote(name):
        folder = download(name) if connect else downloaded(name)
        return SafetensorsCheckpoint.open(folder, source=name)
    shipped = Path(str(resources.files("cetane"))) / "data" / name
    if is_file(shipped / "config.json"):
        raise CetaneError(f"no such file or folder: {name}", f"cetane's own {name} is {shipped}")
    raise CetaneError(f"no such file or folder: {name}", f"give {KINDS}")


def is_remote(source: str) -> bool:
    """Whether a source is a URL, or has the form of a hub id. A path of that form wins over it."""
    hub_id = HUB_ID.fullmatch(source) and not _WEIGHT_FILE.fullmatch(source)
    return "://" in source or bool(hub_id)


def _open_file(path: Path) -> Checkpoint:
    refuse_pickle([path])
    if path.suffix == ".safetensors":
        shard = shard_of_name(path.name)
        if shard is not None and shard[2] > 1:
            raise CetaneError(
                f"{path} is one of {shard[2]} shards of a model", f"give its folder: {path.parent}"
            )
        return SafetensorsCheckpoint.open(path.parent, weights=path)
    if path.suffix == ".gguf" or _is_gguf(path):
        return GGUFCheckpoint.open(path)
    raise CetaneError(
        f"{path} is neither a GGUF nor a safetensors file", "give the model's folder or .gguf file"
    )


def _is_gguf(path: Path) -> bool:
    """Whether a file begins as a GGUF file does, whatever its name."""
    try:
        with open_regular(path) as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise CetaneError(f"cannot read {path}: {error.strerror}") from error
