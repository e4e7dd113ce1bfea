"""The safetensors files of a folder: their index, their shards, and the header of each.

A header, an index and names are foreign data, and checked before anything is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from cetane.checkpoint.dtypes import BITS
from cetane.checkpoint.stored_tensors import StoredFile, StoredTensor, read_range
from cetane.errors import CetaneError
from cetane.files import read_json, refuse_pointer
from cetane.validation import parse_json

_MAX_DIMS = 8
_MAX_HEADER = 100_000_000  # bytes; the format's own limit
MOST_SHARDS = 1 << 10
"""The most shards of a model. Llama 3.1 405B has 191."""
MOST_TENSORS = 1 << 20
"""The most tensors of all shards. DeepSeek-V3, with 256 experts a layer, has some 92,000."""
_PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}
INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
_SHARD = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")


def refuse_pickle(paths: Iterable[Path], hint: str | None = None) -> None:
    """Raise CetaneError if one of `paths` has a format that runs code when it is loaded. `hint`
    says how to convert it, if it is no model."""
    for path in paths:
        if path.suffix.lower() in _PICKLE_SUFFIXES:
            raise CetaneError(
                f"{path} is a pickle, and pickle executes code when it is loaded",
                hint
                or "convert it with transformers, if you trust it: AutoModelForCausalLM."
                f"from_pretrained({str(path.parent)!r}).save_pretrained(NEW); then copy the "
                "tokenizer's files into NEW",
            )


def folder_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the folder's one file, or of the shards in its index."""
    # The order of preference is transformers'.
    if (folder / WEIGHTS).is_file():
        return read_header(folder / WEIGHTS)
    if (folder / INDEX).is_file():
        return read_index(folder / INDEX, partial(_shard_path, folder / INDEX))
    files = sorted(folder.glob("*.safetensors"))
    if _is_whole(files):
        return _merged(files, folder)
    if files:
        raise CetaneError(
            f"{folder} has safetensors files ({len(files)}), but no {INDEX}",
            f"download {INDEX} and all files that it names, or give the path of a whole model",
        )
    refuse_pickle(sorted(folder.iterdir()))
    raise CetaneError(
        f"{folder} has no safetensors file",
        gguf_hint(folder) or "a checkpoint needs model.safetensors",
    )


def gguf_hint(folder: Path) -> str | None:
    """The hint for a folder that holds GGUF files; None if it holds none."""
    ggufs = sorted(folder.glob("*.gguf"))
    return f"open {ggufs[0]} itself" if ggufs else None


def snapshot_hint(folder: Path) -> str | None:
    """The hint for a model's folder in the hub's cache, which holds one for each commit; None for
    any other folder."""
    configs = sorted(folder.glob("snapshots/*/config.json"))
    return f"give {configs[-1].parent}" if configs else None


def _is_whole(files: list[Path]) -> bool:
    """Whether files are one model: a single file, or all shards by their names."""
    shards = [shard for file in files if (shard := shard_of_name(file.name))]
    if not shards:
        return len(files) == 1
    stem, _, count = shards[0]
    expected = [(stem, number, count) for number in range(1, len(files) + 1)]
    return count == len(files) and sorted(shards) == expected


def shard_of_name(name: str) -> tuple[str, int, int] | None:
    """Stem, number and count of a name such as `model-00001-of-00004.safetensors`."""
    parts = _SHARD.fullmatch(name)
    return (parts[1], int(parts[2]), int(parts[3])) if parts else None


def _merged(files: Iterable[StoredFile], folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of some files. CetaneError for a name that two of them have."""
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in read_header(file).items():
            if name in tensors:
                other = tensors[name].file.name
                raise CetaneError(f"{folder} holds tensor {name!r} in {other} and {file.name}")
            tensors[name] = tensor
        if len(tensors) > MOST_TENSORS:
            raise CetaneError(f"{folder} holds more than {MOST_TENSORS:,} tensors")
    return tensors


def read_index(index: Path, shard_of: Callable[[str], StoredFile]) -> dict[str, StoredTensor]:
    """Every tensor of the shards that an index names; `shard_of` gives a shard by its name."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CetaneError(f"{index} has no weight_map")
    if not all(isinstance(file, str) for file in weight_map.values()):
        raise CetaneError(f"{index} has a weight_map that does not map names to files")
    shards = list(dict.fromkeys(weight_map.values()))
    if len(shards) > MOST_SHARDS:  # of each, a server is asked three times
        raise CetaneError(f"{index} names {len(shards):,} shards, more than {MOST_SHARDS:,}")
    for file in shards:
        check_shard_name(index, file)
    tensors = _merged(map(shard_of, shards), index.parent)
    for name, file in weight_map.items():
        if name not in tensors or tensors[name].file.name != file:
            raise CetaneError(f"{index} places tensor {name!r} in {file}, which does not hold it")
    return tensors


def check_shard_name(index: Path, file: str) -> None:
    """Raise CetaneError for a name that is no shard beside the index."""
    # An index is foreign data. It must not name a file outside its own folder.
    if Path(file).name != file or "\\" in file:
        raise CetaneError(f"{index} names a shard outside its folder: {file!r}")
    if not file.endswith(".safetensors"):
        raise CetaneError(f"{index} names a shard that is not a safetensors file: {file!r}")


def _shard_path(index: Path, file: str) -> Path:
    shard = index.parent / file
    if not shard.is_file():
        raise CetaneError(f"{index} names {file}, which is missing", "download the rest")
    return shard


def read_header(path: StoredFile) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file. Raises CetaneError unless its header fits it exactly.

    The safetensors package (0.8) would not do. Of two tensors of one name it silently takes the
    last. It does not give a tensor's offset, which `rows` and stacked experts need.
    """

    def bad(why: str) -> CetaneError:
        return CetaneError(f"{path} is not a valid safetensors file: {why}", "download it again")

    # A pipe or a device has no size, and a link may lead nowhere: a hub cache without its blobs.
    if isinstance(path, Path) and not path.is_file():
        fault = "is not a regular file" if path.exists() else "is missing"
        raise CetaneError(f"{path} {fault}", "download it again")
    size = path.stat().st_size if isinstance(path, Path) else path.size
    length = int.from_bytes(read_range(path, 0, 8), "little") if size >= 8 else size
    if length > min(size - 8, _MAX_HEADER):
        if isinstance(path, Path):
            refuse_pointer(path)
        raise bad(f"its header does not fit in its {size} bytes")
    header = parse_json(read_range(path, 8, length), f"{path}: its header", unique=True)
    if not isinstance(header, dict):
        raise bad("its header is not a JSON object")
    header.pop("__metadata__", None)

    start = 8 + length
    tensors: dict[str, StoredTensor] = {}
    for name, entry in header.items():
        try:
            tensors[name] = tensor_at(path, start, size, entry)
        except ValueError as error:
            raise bad(f"tensor {name!r} {error}") from None
    try:
        check_gapless(tensors, start, size)
    except ValueError as error:
        raise bad(str(error)) from None
    return tensors


def tensor_at(file: StoredFile, start: int, size: int, entry: Any) -> StoredTensor:
    """The tensor of a header's entry, in a file of `size` bytes whose data begin at `start`.

    Raises ValueError, with what is wrong, for an entry that does not fit the file.
    """
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise ValueError("lacks a dtype, shape or data_offsets") from None
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ValueError(f"has unknown dtype {dtype!r}")
    if not isinstance(shape, list) or not all(_is_count(n) for n in (*shape, begin, end)):
        raise ValueError("has a malformed shape or offset")
    if len(shape) > _MAX_DIMS or (end - begin) * 8 != math.prod(shape) * BITS[dtype]:
        raise ValueError(f"of shape {shape} in {dtype} has {end - begin} bytes")
    if start + end > size:
        raise ValueError(f"ends {start + end - size} bytes after the end of the file")
    return StoredTensor(file, start + begin, end - begin, tuple(shape), dtype)


def check_gapless(tensors: Mapping[str, StoredTensor], start: int, size: int) -> None:
    """Raise ValueError unless the tensors fill a file from `start` to its end. The format allows
    neither holes nor overlaps."""
    position = start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset != position:
            raise ValueError(f"tensor {name!r} overlaps another or leaves a hole before it")
        position += tensor.nbytes
    if position != size:
        raise ValueError(f"{size - position} bytes after the last tensor belong to none")


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0
