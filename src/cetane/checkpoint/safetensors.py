"""Checkpoints in Hugging Face's form: config.json, safetensors, tokenizer.json."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cetane.checkpoint.checkpoint import (
    Checkpoint,
    Identity,
    StoredFile,
    StoredTensor,
    identity_of,
    read_range,
)
from cetane.checkpoint.experts import stack_experts
from cetane.checkpoint.integers import BITS, to_torch
from cetane.checkpoint.quantized import QuantizedTensor, dequantized
from cetane.checkpoint.text_part import has_text_part, text_config, text_tensors
from cetane.checkpoint.tokenizer import Tokenizer
from cetane.checkpoint.tokenizer_files import TOKENIZER_FILES
from cetane.checkpoint.zaya_original import hf_config, hf_tensors, is_original
from cetane.errors import CetaneError
from cetane.files import read_json, refuse_pointer
from cetane.validation import parse_json

if TYPE_CHECKING:
    import torch

_MAX_DIMS = 8
_MAX_HEADER = 100_000_000  # bytes; the format's own limit
_PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}
INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
_SHARD = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")
_PREFIX = "model."
EMBEDDING, HEAD = f"{_PREFIX}embed_tokens.weight", "lm_head.weight"
_LFM2_TIE = "tie_embedding"
PIECE = 1 << 22
"""Bytes that are compared at a time."""


class SafetensorsCheckpoint(Checkpoint):
    """A folder in the form of `save_pretrained`, or in Zyphra's own form of ZAYA.

    Of a multimodal model it has only the text part.
    """

    folder: Path

    def __init__(self, source: str, folder: Path, tensors: dict[str, StoredTensor]) -> None:
        path = folder / "config.json"
        config = read_json(path)
        if "configuration_files" in config:
            raise CetaneError(
                f"{path} names other files for versions of transformers: configuration_files",
                "make config.json of the file for your version, without that key",
            )
        self.folder = folder
        self._in_files = tensors  # under the files' own names
        tensors, config, quantization = dequantized(tensors, config, path)
        if is_original(config):
            config = hf_config(config, path)
            tensors = hf_tensors(tensors, config, path)
        elif has_text_part(config):
            config, tensors = text_config(config, path), text_tensors(tensors, path)
        else:
            config, tensors = as_whole_model(config), with_prefix(tensors)
        tensors = stack_experts(tensors, path)
        if config.get("tie_word_embeddings") is not False and has_own_head(tensors):
            config = config | {"tie_word_embeddings": False}
        super().__init__(source, config, tensors)
        self.quantization = quantization
        if folder.parent.name == "snapshots":  # the hub's cache names folders for commits
            self.revision = folder.name

    @classmethod
    def open(
        cls, folder: Path, weights: Path | None = None, source: str | None = None
    ) -> SafetensorsCheckpoint:
        """Open `folder`, or only the file `weights` in it. CetaneError names the file at fault."""
        if not (folder / "config.json").is_file():
            refuse_adapter(folder)
            refuse_bundle(folder)
            raise CetaneError(
                f"{folder} has no config.json",
                _gguf_hint(folder) or "give the folder that holds config.json",
            )
        tensors = _read_shards(folder) if weights is None else read_header(weights)
        return cls(source or str(weights or folder), folder, tensors)

    def read(self, name: str) -> torch.Tensor:
        return read_tensor(self._stored(name))

    def _read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        return read_tensor(self._stored(name).rows(start, stop))

    def _load_tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.folder)

    def identified(self, identity: Identity) -> str:
        shards = sorted({tensor.file for tensor in self._in_files.values()}, key=str)
        others = [self.folder / name for name in ("config.json", *TOKENIZER_FILES)]
        digest = hashlib.sha256()
        for file in shards:
            digest.update(identity_of(file, identity).encode())
        for path in filter(Path.is_file, others):
            digest.update(self._identity_beside(path, identity).encode())
        for name, tensor in sorted(self._in_files.items()):
            digest.update(f"{name} {tensor.file.name} {tensor.offset} {tensor.nbytes} ".encode())
            digest.update(f"{tensor.shape} {tensor.dtype}\n".encode())
        return digest.hexdigest()

    def _identity_beside(self, path: Path, identity: Identity) -> str:
        """The identity of a file beside the weights."""
        return identity(path)


def as_whole_model(config: dict[str, Any]) -> dict[str, Any]:
    """The config of a model that is no part of another one.

    A Mistral that says which layers slide is a Ministral: `AutoConfig.from_pretrained` changes its
    type. A Mistral has one kind of layers, and would ignore it. LFM2 has a second name for the tie
    of its head, which would win over the common name that cetane sets for a head of its own.
    """
    kind = config.get("model_type")
    if kind == "mistral" and "layer_types" in config:
        return config | {"model_type": "ministral"}
    if kind in ("lfm2", "lfm2_moe") and _LFM2_TIE in config:
        rest = {key: value for key, value in config.items() if key != _LFM2_TIE}
        return rest | {"tie_word_embeddings": config[_LFM2_TIE]}
    return config


def with_prefix(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors by the names of a model with a head.

    A model without a head is saved without `model.` in front. transformers loads it into one with a
    head too.
    """
    if EMBEDDING.removeprefix(_PREFIX) not in tensors or EMBEDDING in tensors:
        return tensors
    return {n if n.startswith("lm_head.") else f"{_PREFIX}{n}": t for n, t in tensors.items()}


def has_own_head(tensors: Mapping[str, StoredTensor]) -> bool:
    """Whether a head is stored that is not the embedding's table.

    A config may say that they are tied; transformers 5 ties them only if they are equal
    (`PreTrainedModel.tie_weights`). Both are read up to the first piece that differs.
    """
    head, table = tensors.get(HEAD), tensors.get(EMBEDDING)
    if head is None or table is None:
        return False
    if (head.shape, head.stored_as) != (table.shape, table.stored_as):
        return True
    if isinstance(head, QuantizedTensor):  # decoding two tables only to compare them takes long
        return True
    pieces = [(at, min(PIECE, head.nbytes - at)) for at in range(0, head.nbytes, PIECE)]
    return any(
        read_range(head.file, head.offset + at, size)
        != read_range(table.file, table.offset + at, size)
        for at, size in pieces
    )


def read_tensor(stored: StoredTensor) -> torch.Tensor:
    """The tensor in its stored dtype; a quantised weight in fp32."""
    return stored.values() if isinstance(stored, QuantizedTensor) else to_torch(stored)


def refuse_adapter(folder: Path) -> None:
    """Raise CetaneError, which names the base, if a folder holds an adapter of peft or mlx-lm."""
    path = folder / "adapter_config.json"
    if path.is_file():
        config = read_json(path)
        base = config.get("base_model_name_or_path") or config.get("model") or "its base model"
        raise CetaneError(
            f"{folder} holds an adapter, not a model", f"give {base}, and add --lora {folder}"
        )


def refuse_bundle(folder: Path) -> None:
    """Raise CetaneError, which names the model, if a folder holds a bundle."""
    path = folder / "manifest.json"
    if path.is_file() and (source := read_json(path).get("source")):
        raise CetaneError(
            f"{folder} holds a bundle, not a model", f"give the model that it was made of: {source}"
        )


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


def _read_shards(folder: Path) -> dict[str, StoredTensor]:
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
        _gguf_hint(folder) or "a checkpoint needs model.safetensors",
    )


def _gguf_hint(folder: Path) -> str | None:
    """The hint for a folder that holds GGUF files; None if it holds none."""
    ggufs = sorted(folder.glob("*.gguf"))
    return f"open {ggufs[0]} itself" if ggufs else None


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
    return tensors


def read_index(index: Path, shard_of: Callable[[str], StoredFile]) -> dict[str, StoredTensor]:
    """Every tensor of the shards that an index names; `shard_of` gives a shard by its name."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CetaneError(f"{index} has no weight_map")
    if not all(isinstance(file, str) for file in weight_map.values()):
        raise CetaneError(f"{index} has a weight_map that does not map names to files")
    shards = list(dict.fromkeys(weight_map.values()))
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
            dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        except (KeyError, TypeError, ValueError):
            raise bad(f"tensor {name!r} lacks a dtype, shape or data_offsets") from None
        if not isinstance(dtype, str) or dtype not in BITS:
            raise bad(f"tensor {name!r} has unknown dtype {dtype!r}")
        if not isinstance(shape, list) or not all(_is_count(n) for n in (*shape, begin, end)):
            raise bad(f"tensor {name!r} has a malformed shape or offset")
        if len(shape) > _MAX_DIMS or (end - begin) * 8 != math.prod(shape) * BITS[dtype]:
            raise bad(f"tensor {name!r} of shape {shape} in {dtype} has {end - begin} bytes")
        if start + end > size:
            raise bad(f"tensor {name!r} ends {start + end - size} bytes after the end of the file")
        tensors[name] = StoredTensor(path, start + begin, end - begin, tuple(shape), dtype)

    # The format allows neither holes nor overlaps.
    position = start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset != position:
            raise bad(f"tensor {name!r} overlaps another or leaves a hole before it")
        position += tensor.nbytes
    if position != size:
        raise bad(f"{size - position} bytes after the last tensor belong to none")
    return tensors


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0
