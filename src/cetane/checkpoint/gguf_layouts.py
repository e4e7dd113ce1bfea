"""How to make Hugging Face's tensors from those that a GGUF file keeps in another form.

Source: `modify_tensors` in llama.cpp's conversion scripts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from cetane.checkpoint.stored_tensors import StoredTensor

Config = Mapping[str, Any]
Array = np.ndarray
Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorRule:
    """A rule that makes a tensor of pieces of a file, in every layer that has these pieces."""

    name: str
    """The ending of the tensor's name."""
    parts: tuple[str, ...]
    """The endings of the names of the pieces, under which they were renamed."""
    make: Callable[..., Array]
    """`make(config, *pieces)`, of fp32 arrays. A ValueError if they do not fit each other."""
    shape: Callable[..., Shape] | None = None
    """A function that gives the tensor's shape, `shape(config, *shapes of pieces)`. None if each
    row of the tensor is made of the same row of each piece: then one row tells its shape."""


@dataclass(frozen=True, slots=True)
class MadeTensor(StoredTensor):
    """A tensor that is made of pieces after they are dequantised."""

    parts: tuple[StoredTensor, ...]
    make: Callable[..., Array]
    by_row: bool

    @classmethod
    def of(cls, config: Config, rule: TensorRule, parts: tuple[StoredTensor, ...]) -> MadeTensor:
        """The tensor by a rule. Its shape is tried on one row, or computed. ValueError if the
        pieces do not fit each other."""

        def make(*pieces: Array) -> Array:
            return rule.make(config, *pieces)

        first = parts[0]
        if rule.shape is not None:
            shape = rule.shape(config, *(part.shape for part in parts))
        else:
            if any(part.shape[0] != first.shape[0] for part in parts):
                raise ValueError("different numbers of rows")
            row = make(*(np.zeros((1, *part.shape[1:]), np.float32) for part in parts))
            shape = (first.shape[0], *row.shape[1:])
        nbytes = sum(part.nbytes for part in parts)
        by_row = rule.shape is None
        return cls(first.file, first.offset, nbytes, shape, first.dtype, parts, make, by_row)

    def rows(self, start: int, stop: int) -> StoredTensor:
        """Some rows; only of what is made row by row."""
        assert self.by_row
        parts = tuple(part.rows(start, stop) for part in self.parts)
        nbytes = sum(part.nbytes for part in parts)
        shape = (stop - start, *self.shape[1:])
        return MadeTensor(self.file, self.offset, nbytes, shape, self.dtype, parts, self.make, True)


def one_piece(
    name: str, make: Callable[..., Array], shape: Callable[..., Shape] | None
) -> TensorRule:
    """The rule of a tensor that is made of one piece, which has its name."""
    return TensorRule(name, (name,), make, shape)


def same_shape(config: Config, shape: Shape) -> Shape:
    return shape


# llama.cpp rotates neighbours (0, 1), (2, 3) ... of each head. Hugging Face rotates the first half
# against the second.


def split_halves(heads: str) -> Callable[[Config, Array], Array]:
    """A function that sorts the rows of each head: first all pairs' first rows, then their second.

    It takes and gives rows `(heads * D, ...)`. `heads` is the config's key for the number of heads.
    """

    def make(config: Config, rows: Array) -> Array:
        pairs = rows.reshape(config[heads], -1, 2, *rows.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)

    return make


def head_by_head(config: Config, rows: Array) -> Array:
    """All queries' rows, then all keys' and values' -> those of each head together."""
    parts = rows.reshape(3, config["num_attention_heads"], -1, *rows.shape[1:])
    return np.ascontiguousarray(parts.swapaxes(0, 1)).reshape(rows.shape)


def of_three(config: Config, stored: Shape) -> Shape:
    if stored[0] != 3 * config["hidden_size"]:
        raise ValueError(f"shape {stored} does not fit {config['hidden_size']} channels")
    return stored


HEAD_BY_HEAD = tuple(
    one_piece(f".query_key_value.{leaf}", head_by_head, of_three) for leaf in ("weight", "bias")
)
TRANSPOSED = tuple(
    one_piece(
        f".{name}.weight",
        lambda config, stored: np.ascontiguousarray(stored.T),
        lambda config, stored: stored[::-1],
    )
    for name in ("c_attn", "c_proj", "c_fc")
)
"""GPT-2's matrices, which Hugging Face keeps as `(I, O)`."""


def of_heads(heads: str) -> Callable[[Config, Shape], Shape]:
    """A function that checks and returns the shape of the rows of all heads."""

    def shape(config: Config, stored: Shape) -> Shape:
        if stored[0] != config[heads] * config["head_dim"]:
            raise ValueError(f"shape {stored} is not {config[heads]} heads of {config['head_dim']}")
        return stored

    return shape


INTERLEAVED = tuple(
    one_piece(f".{part}_proj.{leaf}", split_halves(heads), of_heads(heads))
    for part, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads"))
    for leaf in ("weight", "bias")
)


def less_one(config: Config, stored: Array) -> Array:
    return stored - 1


def as_stored(config: Config, stored: Array) -> Array:
    return stored


GAINS_LESS_ONE = (one_piece("norm.weight", less_one, same_shape),)
QWEN_GAINS = (one_piece("linear_attn.norm.weight", as_stored, same_shape), *GAINS_LESS_ONE)


# Experts: transformers has gates and ups in one tensor; gpt-oss transposed, and in turn.


def one_after_other(config: Config, gate: Array, up: Array) -> Array:
    """Gates and ups `(E, I, H)` -> `(E, 2 I, H)`: all gates, then all ups."""
    if gate.ndim != 3 or gate.shape != up.shape:
        raise ValueError("gates and ups of different shapes")
    return np.concatenate([gate, up], axis=1)


def in_turn(config: Config, gate: Array, up: Array) -> Array:
    """Gates and ups `(E, I, H)` -> `(E, H, 2 I)`, a gate, then its up; biases `(E, I)` ->
    `(E, 2 I)`."""
    if gate.ndim not in (2, 3) or gate.shape != up.shape:
        raise ValueError("gates and ups of different shapes")
    pairs = np.stack([gate, up], axis=2).reshape(len(gate), -1, *gate.shape[2:])
    return transposed(config, pairs) if pairs.ndim == 3 else pairs


def transposed(config: Config, matrices: Array) -> Array:
    """The transposed matrix of each expert: `(E, M, N)` -> `(E, N, M)`."""
    if matrices.ndim != 3:
        raise ValueError("not a matrix for each expert")
    return np.ascontiguousarray(matrices.swapaxes(1, 2))


_PREFIX = ".experts."


def gates_and_ups(name: str, leaf: str, make: Callable[..., Array]) -> TensorRule:
    parts = tuple(f"{_PREFIX}{part}_proj.{leaf}" for part in ("gate", "up"))
    return TensorRule(f"{_PREFIX}{name}", parts, make)


EXPERTS = (
    gates_and_ups("gate_up_proj", "weight", one_after_other),
    TensorRule(f"{_PREFIX}down_proj", (f"{_PREFIX}down_proj.weight",), as_stored),
)


SHARED_MLPS = (
    TensorRule(
        ".shared_mlp.input_linear.weight",
        (".shared_mlp.gate_proj.weight", ".shared_mlp.up_proj.weight"),
        lambda config, gate, up: np.concatenate([gate, up]),
        lambda config, gate, up: both(gate, up),
    ),
)
"""Granite's MLP that all tokens take: gates, then ups."""


def both(gate: Shape, up: Shape) -> Shape:
    """The shape of gates and ups, one below the other."""
    if gate != up:
        raise ValueError("gates and ups of different shapes")
    return 2 * gate[0], *gate[1:]


def as_row(config: Config, stored: Array) -> Array:
    return stored.reshape(1, -1)


def of_row(config: Config, stored: Shape) -> Shape:
    return 1, prod(stored)


SHARED_GATES = (one_piece(".shared_expert_gate.weight", as_row, of_row),)
"""Gates of shared experts, of which many files have one axis."""
TRANSPOSED_EXPERTS = (
    gates_and_ups("gate_up_proj", "weight", in_turn),
    gates_and_ups("gate_up_proj_bias", "bias", in_turn),
    TensorRule(f"{_PREFIX}down_proj", (f"{_PREFIX}down_proj.weight",), transposed),
    TensorRule(f"{_PREFIX}down_proj_bias", (f"{_PREFIX}down_proj.bias",), as_stored),
)


# Short convolutions: a channel's taps are a row.


def with_group(config: Config, taps: Array) -> Array:
    """`(C, taps)` -> `(C, 1, taps)`."""
    return taps[:, None]


SHORT_CONVOLUTIONS = (one_piece(".conv.conv.weight", with_group, None),)


# DeepSeek: the file keeps what makes keys transposed for each head, apart from what makes values.


def both_of_latent(config: Config, keys: Array, values: Array) -> Array:
    """Keys' `(heads, rank, plain)` and values' `(heads, out, rank)` -> `(heads * (plain + out),
    rank)`, the rows of a head together."""
    heads = np.concatenate([keys.swapaxes(1, 2), values], axis=1)
    return np.ascontiguousarray(heads).reshape(-1, heads.shape[2])


def of_latent(config: Config, keys: Shape, values: Shape) -> Shape:
    heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
    plain, out = config["qk_nope_head_dim"], config["v_head_dim"]
    if (keys, values) != ((heads, rank, plain), (heads, out, rank)):
        raise ValueError(f"shapes {keys} and {values} do not fit {heads} heads on a latent")
    return heads * (plain + out), rank


LATENTS = (
    TensorRule(
        ".kv_b_proj.weight", (".k_b_proj.weight", ".v_b_proj.weight"), both_of_latent, of_latent
    ),
)


# The delta rule. Hugging Face's Qwen3-Next keeps q, k, v and z of a key head together; the file
# keeps them apart. Hugging Face's Qwen3.5 keeps the value heads of a key head together; the file
# keeps the first value head of every key head, then the second of every one.


def decays_log(config: Config, stored: Array) -> Array:
    """`A_log` of the file's `-exp(A_log)`."""
    with np.errstate(all="ignore"):  # what is not a decay becomes NaN, which no port takes
        return np.log(-stored)


def _delta(config: Config) -> tuple[int, int, int, int]:
    """Key heads, value heads for each of them, and the widths of both."""
    heads = config["linear_num_key_heads"]
    groups = config["linear_num_value_heads"] // heads
    return heads, groups, config["linear_key_head_dim"], config["linear_value_head_dim"]


def by_key_head(config: Config, qkv: Array, z: Array) -> Array:
    """The rows of q, k, v and z of each key head together."""
    heads, groups, keys, values = _delta(config)
    sizes = [heads * keys, heads * keys, heads * groups * values]
    q, k, v = np.split(qkv, np.cumsum(sizes)[:-1])
    parts = [part.reshape(heads, -1, qkv.shape[1]) for part in (q, k, v, z)]
    return np.concatenate(parts, axis=1).reshape(-1, qkv.shape[1])


def of_qkvz(config: Config, qkv: Shape, z: Shape) -> Shape:
    heads, groups, keys, values = _delta(config)
    rows = 2 * heads * keys, heads * groups * values
    if qkv[0] != sum(rows) or z[0] != rows[1] or qkv[1:] != z[1:]:
        raise ValueError(f"shapes {qkv} and {z} do not fit {heads} key heads")
    return sum(rows) + rows[1], *qkv[1:]


def grouped(config: Config, rows: Array) -> Array:
    """Rows of value heads, those of a key head together."""
    heads, groups, _, _ = _delta(config)
    tiled = rows.reshape(groups, heads, -1, *rows.shape[1:])
    return np.ascontiguousarray(tiled.swapaxes(0, 1)).reshape(rows.shape)


def grouped_values(config: Config, qkv: Array) -> Array:
    """The same where queries and keys lie before the values."""
    heads, _, keys, _ = _delta(config)
    before = 2 * heads * keys
    return np.concatenate([qkv[:before], grouped(config, qkv[before:])])


def grouped_columns(config: Config, stored: Array) -> Array:
    return np.ascontiguousarray(grouped(config, stored.T).T)


def of_values(config: Config, stored: Shape) -> Shape:
    heads, groups, _, _ = _delta(config)
    if stored[0] % (heads * groups):
        raise ValueError(f"shape {stored} does not fit {heads * groups} value heads")
    return stored


def of_qkv(config: Config, stored: Shape) -> Shape:
    heads, groups, keys, values = _delta(config)
    if stored[0] != 2 * heads * keys + heads * groups * values:
        raise ValueError(f"shape {stored} does not fit {heads} key heads")
    return stored


def of_columns(config: Config, stored: Shape) -> Shape:
    of_values(config, stored[::-1])
    return stored


def as_vector(config: Config, stored: Array) -> Array:
    return stored.reshape(-1)


def of_vector(config: Config, stored: Shape) -> Shape:
    return (prod(stored),)


MAMBA_2 = (
    one_piece(".conv1d.weight", with_group, None),
    one_piece(
        ".A_log",
        lambda config, stored: decays_log(config, as_vector(config, stored)),
        of_vector,
    ),
    *(one_piece(name, as_vector, of_vector) for name in (".mamba.D", ".mamba.norm.weight")),
)
"""Vectors that the file has as columns, or group by group."""

QWEN3_NEXT = (
    *QWEN_GAINS,
    TensorRule(
        ".in_proj_qkvz.weight", (".in_proj_qkv.weight", ".in_proj_z.weight"), by_key_head, of_qkvz
    ),
    one_piece(".conv1d.weight", with_group, None),
    one_piece(".A_log", decays_log, same_shape),
)
QWEN3_5 = (
    *QWEN_GAINS,
    one_piece(".in_proj_qkv.weight", grouped_values, of_qkv),
    *(one_piece(f".in_proj_{part}.weight", grouped, of_values) for part in ("z", "a", "b")),
    one_piece(
        ".conv1d.weight",
        lambda config, taps: grouped_values(config, taps)[:, None],
        lambda config, stored: (of_qkv(config, stored)[0], 1, stored[1]),
    ),
    one_piece(
        ".A_log", lambda config, stored: grouped(config, decays_log(config, stored)), of_values
    ),
    one_piece(".dt_bias", grouped, of_values),
    one_piece(".linear_attn.out_proj.weight", grouped_columns, of_columns),
)
