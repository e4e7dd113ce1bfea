"""How the converter keeps layers that carry a state: convolutions, the delta rule and Mamba-2.

Source: `modify_tensors` in llama.cpp's conversion scripts.
"""

from __future__ import annotations

from math import prod

import numpy as np

from cetane.checkpoint.gguf.layouts import GAINS_LESS_ONE
from cetane.checkpoint.gguf.rules import (
    Array,
    Config,
    Shape,
    TensorRule,
    as_stored,
    one_piece,
    same_shape,
)

# Short convolutions: a channel's taps are a row.


def with_group(config: Config, taps: Array) -> Array:
    """`(C, taps)` -> `(C, 1, taps)`."""
    return taps[:, None]


SHORT_CONVOLUTIONS = (one_piece(".conv.conv.weight", with_group, None),)


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
    *(
        one_piece(f".{home}.{name}", as_vector, of_vector)
        for home in ("mamba", "mixer")
        for name in ("D", "norm.weight")
    ),
)
"""Vectors that the file has as columns, or group by group."""

QWEN_GAINS = (one_piece("linear_attn.norm.weight", as_stored, same_shape), *GAINS_LESS_ONE)
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
