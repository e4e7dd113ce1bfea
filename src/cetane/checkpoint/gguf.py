"""Checkpoints in one GGUF file, with Hugging Face's names and shapes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from cetane.checkpoint.checkpoint import Checkpoint, Identity, StoredTensor, identity_of
from cetane.checkpoint.gguf_architectures import ARCHITECTURES, MIXTRAL, Architecture
from cetane.checkpoint.gguf_config import build_config
from cetane.checkpoint.gguf_file import GGUFFile, read_gguf, read_split
from cetane.checkpoint.gguf_tokenizer import load_gguf_tokenizer
from cetane.checkpoint.tokenizer import Tokenizer
from cetane.errors import CetaneError

if TYPE_CHECKING:
    import torch

_CHUNK = 1 << 22  # weights dequantised at a time; bounds the scratch memory
# parts of the config
_NOT_WEIGHTS = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}


class GGUFCheckpoint(Checkpoint):
    """One GGUF file of an architecture in `ARCHITECTURES`."""

    def __init__(self, file: GGUFFile, architecture: Architecture) -> None:
        config = build_config(file, architecture)
        super().__init__(str(file.path), config, _rename(file, architecture, config))
        self._file = file
        self._architecture = architecture

    @classmethod
    def open(cls, path: Path) -> GGUFCheckpoint:
        """Read the header of `path`. CetaneError if it is broken or not supported."""
        file = read_split(read_gguf(path))
        name = file.metadata.get("general.architecture")
        if not isinstance(name, str) or name not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise CetaneError(f"{path} holds a model of architecture {name!r}; known are: {known}")
        mixtral = name == "llama" and file.metadata.get("llama.expert_count")
        return cls(file, MIXTRAL if mixtral else ARCHITECTURES[name])

    def read(self, name: str) -> torch.Tensor:
        values = _dequantize(self._stored(name))
        heads = self._reordered_heads(name)
        if heads is not None:
            values = _split_halves(values, heads)
        if self._architecture.norms_plus_one and name.endswith("norm.weight"):
            values -= 1
        import torch  # here, so that opening a checkpoint does not load it

        return torch.from_numpy(values)

    def _read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        stored = self._stored(name)
        if len(stored.shape) < 2 or self._reordered_heads(name) is not None or start == stop:
            return super()._read_rows(name, start, stop)
        import torch

        return torch.from_numpy(_dequantize(stored.rows(start, stop)))

    def _reordered_heads(self, name: str) -> int | None:
        """How many heads a tensor has whose rows llama.cpp stores in another order, if it does."""
        if self._architecture.interleaved_rope:
            if ".q_proj." in name:
                return int(self.config["num_attention_heads"])
            if ".k_proj." in name:
                return int(self.config["num_key_value_heads"])
        return None

    def _load_tokenizer(self) -> Tokenizer:
        return load_gguf_tokenizer(self._file)

    def identified(self, identity: Identity) -> str:
        of_tensors = {tensor.file for tensor in self._file.tensors.values()}
        files = sorted(of_tensors | {self._file.path}, key=str)
        told = "".join(identity_of(file, identity) for file in files) + self._file.digest
        return hashlib.sha256(told.encode()).hexdigest()


def _rename(
    file: GGUFFile, architecture: Architecture, config: dict[str, int]
) -> dict[str, StoredTensor]:
    """The tensors, by Hugging Face name. Raises CetaneError unless they are exactly the model's."""
    names = architecture.tensor_names(config["num_hidden_layers"])
    for name in file.tensors:
        if name not in names and name not in _NOT_WEIGHTS:
            raise CetaneError(
                f"{file.path} has tensor {name!r}, which {architecture.model_type} models do not"
            )
    for name in names:
        if name.endswith(".weight") and name not in file.tensors and name != "output.weight":
            raise CetaneError(f"{file.path} lacks tensor {name!r}", "convert or download it again")
    tensors = {
        names[name]: tensor for name, tensor in file.tensors.items() if name not in _NOT_WEIGHTS
    }
    for name, tensor in tensors.items():
        if not _can_dequantize(tensor.dtype):
            raise CetaneError(
                f"{file.path}: tensor {name!r} has the type {tensor.dtype}, which is not supported"
            )
        if ".q_proj." in name or ".k_proj." in name:
            heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
            if tensor.shape[0] != heads * config["head_dim"]:
                raise CetaneError(
                    f"{file.path}: tensor {name!r} has shape {tensor.shape}, "
                    f"not {heads} heads of {config['head_dim']}"
                )
    _with_experts(tensors, str(file.path), architecture.turned_experts)
    return tensors


@dataclass(frozen=True, slots=True)
class ComposedTensor(StoredTensor):
    """A tensor that is made of others after they are dequantised, row by row."""

    parts: tuple[StoredTensor, ...]
    compose: Callable[..., np.ndarray]

    @classmethod
    def of(cls, compose: Callable[..., np.ndarray], *parts: StoredTensor) -> ComposedTensor:
        """`compose` makes the tensor from the parts' values; its shape is tried on one row."""
        row = compose(*(np.zeros((1, *part.shape[1:]), np.float32) for part in parts))
        first, nbytes = parts[0], sum(part.nbytes for part in parts)
        shape = (first.shape[0], *row.shape[1:])
        return cls(first.file, first.offset, nbytes, shape, first.dtype, parts, compose)

    def rows(self, start: int, stop: int) -> StoredTensor:
        return self.of(self.compose, *(part.rows(start, stop) for part in self.parts))


def _with_experts(tensors: dict[str, StoredTensor], where: str, turned: bool) -> None:
    """Put gates and ups of experts into one tensor, as transformers has them.

    `turned`: as gpt-oss has them, transposed, gates and ups in turn.
    """
    for name in [name for name in tensors if name.endswith(".experts.gate_proj.weight")]:
        prefix = name.removesuffix("gate_proj.weight")
        for end, theirs in (("weight", ""), ("bias", "_bias")):
            if f"{prefix}gate_proj.{end}" not in tensors:
                continue
            names = [f"{prefix}{part}_proj.{end}" for part in ("gate", "up", "down")]
            if not set(names) <= set(tensors):
                raise CetaneError(f"{where}: experts with {names[0]} lack other tensors")
            gate, up, down = (tensors.pop(name) for name in names)
            alike = gate.shape == up.shape and gate.shape[0] == down.shape[0]
            if not alike or {len(gate.shape), len(down.shape)} != {2 if theirs else 3}:
                raise CetaneError(f"{where}: the shapes of {prefix}* do not fit each other")
            together = _in_turn if turned else _one_after_other
            tensors[f"{prefix}gate_up_proj{theirs}"] = ComposedTensor.of(together, gate, up)
            turn = turned and not theirs
            tensors[f"{prefix}down_proj{theirs}"] = (
                ComposedTensor.of(_transposed, down) if turn else down
            )


def _one_after_other(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return np.concatenate([gate, up], axis=1)


def _in_turn(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    pairs = np.stack([gate, up], axis=2).reshape(len(gate), -1, *gate.shape[2:])
    return _transposed(pairs) if pairs.ndim == 3 else pairs


def _transposed(matrices: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(matrices.swapaxes(1, 2))


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
    if isinstance(stored, ComposedTensor):
        return stored.compose(*(_dequantize(part) for part in stored.parts))
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


def _split_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's order of q and k rows.

    llama.cpp rotates neighbours (0, 1), (2, 3) ... of each head. Hugging Face rotates the first
    half against the second.
    """
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)
