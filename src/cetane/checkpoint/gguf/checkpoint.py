"""Checkpoints in one GGUF file, with Hugging Face's names and shapes."""

from __future__ import annotations

import hashlib
import math
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from cetane.checkpoint.checkpoint import Checkpoint
from cetane.checkpoint.gguf.architectures import Architecture, architecture_of
from cetane.checkpoint.gguf.config import build_config
from cetane.checkpoint.gguf.file import GGUFFile, read_gguf, read_split
from cetane.checkpoint.gguf.keys import Keys
from cetane.checkpoint.gguf.pieces import apart
from cetane.checkpoint.gguf.rules import MadeTensor
from cetane.checkpoint.gguf.tokenizer import load_gguf_tokenizer
from cetane.checkpoint.stored_tensors import Identity, StoredTensor, identity_of
from cetane.checkpoint.tokenizer import Tokenizer
from cetane.errors import CetaneError

if TYPE_CHECKING:
    import torch

_CHUNK = 1 << 22  # weights dequantised at a time; bounds the scratch memory
_NOT_WEIGHTS = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
"""Tensors that become part of the config."""


class GGUFCheckpoint(Checkpoint):
    """One GGUF file of a known architecture."""

    def __init__(self, file: GGUFFile, architecture: Architecture) -> None:
        config = build_config(file, architecture)
        super().__init__(str(file.path), config, _rename(file, architecture, config))
        self._file = file

    @classmethod
    def open(cls, path: Path) -> GGUFCheckpoint:
        """Read the header of `path`. CetaneError if it is broken or not supported."""
        file = read_split(read_gguf(path))
        keys = Keys(file)
        architecture = architecture_of(keys)
        if architecture is None:
            raise CetaneError(
                f"{path} holds a model of architecture {keys.architecture!r}, which is not read "
                "from GGUF",
                "try the model's safetensors: more architectures are read from them",
            )
        return cls(file, architecture)

    def read(self, name: str) -> torch.Tensor:
        import torch  # here, so that opening a checkpoint does not load it

        return torch.from_numpy(_dequantize(self._stored(name)))

    def _read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        stored = self._stored(name)
        whole = isinstance(stored, MadeTensor) and not stored.by_row
        if whole or len(stored.shape) < 2 or start == stop:
            return super()._read_rows(name, start, stop)
        import torch

        return torch.from_numpy(_dequantize(stored.rows(start, stop)))

    def _load_tokenizer(self) -> Tokenizer:
        return load_gguf_tokenizer(self._file)

    def identified(self, identity: Identity) -> str:
        of_tensors = {tensor.file for tensor in self._file.tensors.values()}
        files = sorted(of_tensors | {self._file.path}, key=str)
        told = "".join(identity_of(file, identity) for file in files) + self._file.digest
        return hashlib.sha256(told.encode()).hexdigest()


def _rename(
    file: GGUFFile, architecture: Architecture, config: dict[str, Any]
) -> dict[str, StoredTensor]:
    """The tensors, by Hugging Face name. Raises CetaneError unless they are exactly the model's."""
    weights, biases = architecture.tensor_names(config)
    names = weights | biases
    drafting = range(config["num_hidden_layers"], Keys(file).integer("block_count"))
    ignored = tuple(f"blk.{index}." for index in drafting)
    unused = _NOT_WEIGHTS | architecture.unused(config)
    stored = {
        name: tensor
        for name, tensor in apart(file.tensors, architecture.stacks, str(file.path)).items()
        if name not in unused and not name.startswith(ignored)
    }
    for name in stored:
        if name not in names:
            raise CetaneError(
                f"{file.path} has tensor {name!r}, which {architecture.model_type} models do not "
                "have"
            )
    for name in weights:
        if name not in stored and name != "output.weight":
            raise CetaneError(f"{file.path} lacks tensor {name!r}", "convert or download it again")
    for name, tensor in stored.items():
        if not _can_dequantize(tensor.dtype):
            raise CetaneError(
                f"{file.path}: tensor {name!r} has the type {tensor.dtype}, which is not supported"
            )
    tensors = {names[name]: tensor for name, tensor in stored.items()}
    _make(tensors, architecture, config, str(file.path))
    for number in architecture.numbers:
        for index, tensor in enumerate(number.tensors(file, config["num_hidden_layers"])):
            tensors[f"{architecture.layers}.{index}.{number.name}"] = tensor
    return tensors


def _make(
    tensors: dict[str, StoredTensor], architecture: Architecture, config: dict[str, Any], where: str
) -> None:
    """Replace what the file keeps in another form by Hugging Face's tensors."""
    done: set[str] = set()
    for rule in architecture.rules:
        first = rule.parts[0]
        for name in [n for n in tensors if n.endswith(first) and n not in done]:
            prefix = name.removesuffix(first)
            pieces = [f"{prefix}{part}" for part in rule.parts]
            if lost := [piece for piece in pieces if piece not in tensors]:
                raise CetaneError(f"{where} has {name}, but no {lost[0]}")
            try:
                made = MadeTensor.of(config, rule, tuple(tensors[piece] for piece in pieces))
            except (ValueError, IndexError) as error:
                raise CetaneError(f"{where}: {prefix}{rule.name}: {error}") from error
            for piece in pieces:
                del tensors[piece]
            tensors[f"{prefix}{rule.name}"] = made
            done.add(f"{prefix}{rule.name}")


@cache
def _can_dequantize(dtype: str) -> bool:
    kind = GGMLQuantizationType[dtype]
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _dequantize(stored: StoredTensor) -> np.ndarray:
    """The tensor as float32. Memory holds its stored bytes, the result and a little scratch."""
    if isinstance(stored, MadeTensor):
        return stored.make(*(_dequantize(part) for part in stored.parts))
    kind = GGMLQuantizationType[stored.dtype]
    data = np.frombuffer(stored.read(), np.uint8)
    if stored.dtype == "F32":
        return data.view(np.float32).reshape(stored.shape)
    columns = stored.shape[-1]
    values = np.empty((math.prod(stored.shape) // columns, columns), np.float32)
    rows = data.reshape(len(values), -1)
    step = max(1, _CHUNK // columns)
    for start in range(0, len(rows), step):
        values[start : start + step] = dequantize(rows[start : start + step], kind)
    return values.reshape(stored.shape)
