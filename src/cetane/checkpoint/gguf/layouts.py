"""How the converter keeps attention, MLPs, experts and gains.

Source: `modify_tensors` in llama.cpp's conversion scripts.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np

from cetane.checkpoint.gguf.rules import (
    Array,
    Config,
    Shape,
    TensorRule,
    as_stored,
    one_piece,
    same_shape,
)

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
    if config["hidden_size"] % config["num_attention_heads"]:
        raise ValueError("the heads do not divide the channels")
    if stored[0] != 3 * config["hidden_size"]:
        raise ValueError(f"shape {stored} does not fit {config['hidden_size']} channels")
    return stored


def group_by_group(config: Config, rows: Array) -> Array:
    """All queries' rows, then all keys' and all values' -> those of each group together."""
    groups, heads = config["num_kv_heads"], config["num_attention_heads"]
    width = config["hidden_size"] // heads
    sizes = np.cumsum([heads * width, groups * width])
    parts = [part.reshape(groups, -1, *rows.shape[1:]) for part in np.split(rows, sizes)]
    return np.concatenate(parts, axis=1).reshape(rows.shape)


def of_groups(config: Config, stored: Shape) -> Shape:
    groups, heads, hidden = (
        config[key] for key in ("num_kv_heads", "num_attention_heads", "hidden_size")
    )
    if hidden % heads or heads % groups:
        raise ValueError(f"{heads} heads and {groups} groups do not divide {hidden} channels")
    if stored[0] != hidden // heads * (heads + 2 * groups):
        raise ValueError(f"shape {stored} is not {heads} heads in {groups} groups")
    return stored


GROUP_BY_GROUP = (one_piece(".query_key_value.weight", group_by_group, of_groups),)
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


def turned_in_turn(config: Config, rows: Array) -> Array:
    """Of the rows of each head that turn: first halves, then second -> a first, then its second."""
    width, turned = config["head_dim"], turning(config)
    heads = rows.reshape(-1, width, *rows.shape[1:]).copy()
    halves = heads[:, :turned].reshape(len(heads), 2, -1, *rows.shape[1:])
    heads[:, :turned] = halves.swapaxes(1, 2).reshape(heads[:, :turned].shape)
    return heads.reshape(rows.shape)


def turning(config: Config) -> int:
    """The channels of a head that turn."""
    return int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"])


def of_turned(heads: str) -> Callable[[Config, Shape], Shape]:
    """A function that checks and returns the shape of the rows of heads that turn in part."""

    def shape(config: Config, stored: Shape) -> Shape:
        if turning(config) % 2:
            raise ValueError(f"{turning(config)} channels of a head turn, which are no pairs")
        return of_heads(heads)(config, stored)

    return shape


PART_IN_TURN = tuple(
    one_piece(f".{part}_proj.{leaf}", turned_in_turn, of_turned(heads))
    for part, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads"))
    for leaf in ("weight", "bias")
)


def less_one(config: Config, stored: Array) -> Array:
    return stored - 1


GAINS_LESS_ONE = (one_piece("norm.weight", less_one, same_shape),)


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


def of_experts(part: str, make: Callable[..., Array] = as_stored) -> TensorRule:
    """The rule of a matrix of all experts, which is one tensor in the file too."""
    return TensorRule(f"{_PREFIX}{part}_proj", (f"{_PREFIX}{part}_proj.weight",), make)


EXPERTS = (gates_and_ups("gate_up_proj", "weight", one_after_other), of_experts("down"))
UNGATED_EXPERTS = (of_experts("up"), of_experts("down"))
JOINED_EXPERTS = (of_experts("gate_up"), of_experts("down"))
"""Experts whose gates and ups are one tensor in the file too."""
LLAMA4_EXPERTS = (
    gates_and_ups(
        "gate_up_proj",
        "weight",
        lambda config, gate, up: transposed(config, one_after_other(config, gate, up)),
    ),
    of_experts("down", transposed),
)
"""Llama 4's, transposed: all gates, then all ups."""


def twice(config: Config, gate: Shape, up: Shape) -> Shape:
    """The shape of gates and ups, one below the other."""
    if gate != up:
        raise ValueError("gates and ups of different shapes")
    return 2 * gate[0], *gate[1:]


SHARED_MLPS = (
    TensorRule(
        ".shared_mlp.input_linear.weight",
        (".shared_mlp.gate_proj.weight", ".shared_mlp.up_proj.weight"),
        lambda config, gate, up: np.concatenate([gate, up]),
        twice,
    ),
)
"""Granite's MLP that all tokens take: gates, then ups."""


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
