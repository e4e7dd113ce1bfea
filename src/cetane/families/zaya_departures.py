"""Departures of the published ANE port of ZAYA1-8B from the model (ane-book, experiments 29 to 35).

Each departure changes one thing in the blocks of `zaya.py`. So its cost can be measured alone, and
together with others; docs/explanation/zaya.md has the table. A recipe lists departures in
`family.departures`. Two more differences follow from them. Convolutions without their history
also start differently. And with the neighbour's gates, the last merge before the final norm is left
out.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cetane.families.base import Weights
from cetane.families.layers import Leaf
from cetane.families.model import Departure, Model, StoredTable

Change = Callable[[Any, Any], None]
"""A function that changes a block; it also gets the checkpoint's weights."""

LARGE_BIAS = 5.0
"""The largest usual bias of a depthwise convolution. Only L00, L76 and L78 of 80 blocks exceed
it."""


def of(part: str) -> Callable[[Change], Change]:
    """A decorator: apply a change only to blocks that have a module of this path. Another change
    may have removed it."""

    def only(change: Change) -> Change:
        return lambda block, weights: (
            change(block, weights) if part in dict(block.named_modules()) else None
        )

    return only


def forget(block: Any, *names: str) -> None:
    """Let a block keep no memory of these names between calls."""
    block.keeps = tuple(name for name in block.keeps if name not in names)


def drop(leaf: Leaf, *names: str) -> None:
    """Remove parameters."""
    for name in names:
        delattr(leaf, name)
        del leaf.held[name]


@of("self_attn")
def query_to_output(block: Any, _: Any) -> None:
    """Experiment 29's probe: attention without keys, values and positions."""
    attn = block.self_attn
    for name in ("k_proj", "values", "convolutions", "means", "qk_norm"):
        delattr(attn, name)
    block.reads, block.keeps = ("hidden",), ()

    def forward(flow: dict[str, Tensor], memory: Any) -> None:
        h = flow["hidden"]
        flow["hidden"] = block.residual(attn.o_proj(attn.q_proj(block.input_layernorm(h))), h)

    block.forward = forward


@of("self_attn.convolutions.conv_qk_grouped")
def no_convolution(block: Any, _: Any) -> None:
    """Experiment 30: queries and keys are used as projected, without convolutions."""
    convolutions = block.self_attn.convolutions
    del convolutions.conv_qk_depthwise, convolutions.conv_qk_grouped
    convolutions.forward = lambda qk, memory: torch.zeros_like(qk)
    forget(block, "conv")


class LastTap(Leaf):
    """A causal convolution per head with only its newest tap."""

    weight: Tensor
    bias: Tensor

    def __init__(self, convolution: Any) -> None:
        super().__init__()
        whole = convolution.held["weight"]
        channels, width, _ = whole.stored
        self.groups = convolution.groups
        self.hold("weight", (channels, width, 1, 1), whole.stored, whole.kind, last_tap)
        self.hold("bias", (channels,))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv2d(x, self.weight, self.bias, groups=self.groups)


def last_tap(kernel: Tensor) -> Tensor:
    return kernel[..., -1]


@of("self_attn.convolutions.conv_qk_grouped")
def current_tap(block: Any, _: Any) -> None:
    """Experiment 31: earlier tokens' taps are dropped from both convolutions."""
    convolutions = block.self_attn.convolutions
    depthwise = convolutions.conv_qk_depthwise
    drop(depthwise, *depthwise.taps[:-1])
    depthwise.taps = depthwise.taps[-1:]
    convolutions.conv_qk_grouped = LastTap(convolutions.conv_qk_grouped)
    convolutions.remembers = False
    forget(block, "conv")


@of("self_attn.convolutions.conv_qk_grouped")
def skip_large_bias(block: Any, weights: Any) -> None:
    """Experiment 31: no convolution where it looked unstable. The cause was the missing q/k
    norm."""
    held = dict(block.weights())["self_attn.convolutions.conv_qk_depthwise.bias"]
    bias = held.read(weights)
    if float(bias.abs().max()) > LARGE_BIAS:
        no_convolution(block, weights)


@of("self_attn.means")
def no_means(block: Any, _: Any) -> None:
    """q + conv(q), k + conv(k) in place of the means of queries and keys."""
    block.self_attn.means.forward = lambda q, k: (q, k)


@of("self_attn.qk_norm")
def no_qk_norm(block: Any, _: Any) -> None:
    """No q/k norm: only the temperature remains."""
    norm = block.self_attn.qk_norm
    norm.forward = lambda q, k: (q, k * norm.temp)


@of("self_attn.qk_norm")
def first_temperature(block: Any, _: Any) -> None:
    """The first head's temperature is used for all heads."""
    norm = block.self_attn.qk_norm
    norm.hold("temp", (1, 1, 1), norm.held["temp"].stored, pick=lambda temperature: temperature[:1])


@of("self_attn.values")
def undelayed_value(block: Any, _: Any) -> None:
    """The whole value comes from this token."""
    values = block.self_attn.values

    def forward(x: Tensor, memory: Any) -> Tensor:
        both = torch.cat([values.v_proj_current(x), values.v_proj_delayed(x)], 1)
        split: Tensor = values.heads.split(both, values.heads.kv)
        return split

    values.forward = forward
    forget(block, "delayed")


@of("gate")
def silu_router(block: Any, _: Any) -> None:
    """SiLU in place of GELU, and one more SiLU before the norm."""
    mlp = block.gate.router_mlp
    mlp.act = nn.functional.silu
    normed = mlp.norm.forward
    mlp.norm.forward = lambda x: normed(nn.functional.silu(x))


@of("gate")
def no_router_state(block: Any, _: Any) -> None:
    """The router sees only its own layer."""
    if "router" in block.reads:
        drop(block.gate, "router_states_scale")
        block.reads = ("hidden",)


@of("gate")
def bias_on_logits(block: Any, _: Any) -> None:
    """The balancing biases change the probabilities, not only the choice."""
    gate = block.gate

    def judge(logits: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = torch.softmax(logits + gate.balancing_biases, dim=1)
        return probabilities, probabilities

    gate.judge = judge


@of("mlp")
def soft_routing(block: Any, _: Any) -> None:
    """Every expert is weighted by its probability; the skip's probability is dropped."""
    mixture, gate = block.mlp, block.gate
    if "judge" not in vars(gate):  # biases only change the choice, and here is no choice
        drop(gate, "balancing_biases")

        def judge(logits: Tensor) -> tuple[Tensor, Tensor]:
            probabilities = torch.softmax(logits, dim=1)
            return probabilities, probabilities

        gate.judge = judge

    def forward(x: Tensor, probabilities: Tensor, scores: Tensor) -> Tensor:
        mixed: Tensor = mixture.experts[0](x) * probabilities[:, :1]
        for index in range(1, mixture.count):
            mixed = mixed + mixture.experts[index](x) * probabilities[:, index : index + 1]
        return mixed

    mixture.forward = forward
    block.routable = False


def raw_embedding(model: Model, _: Weights) -> Model:
    """No affine map after the embedding."""
    return replace(model, embedding=StoredTable(model.embedding.weight))


def residual_order(block: Any, _: Any) -> None:
    """x * scale + bias where ZAYA has (x + bias) * scale."""
    merge = block.residual
    merge.affine = lambda x, side: (
        x * getattr(merge, f"{side}_scale") + getattr(merge, f"{side}_bias")
    )


def neighbours_gates(block: Any, _: Any) -> None:
    """The gates of the previous merge, which the original checkpoint stores with this block."""
    if not hasattr(block, "self_attn"):
        block.scaling = f"{block.prefix}post_attention_residual_scale."
    elif block.layer:
        block.scaling = f"model.layers.{block.layer - 1}.post_mlp_residual_scale."
    else:
        block.scaling = "model.input_"  # hidden_states_scale and _bias; the residual has no pair
        drop_residual_side(block.residual)


@of("self_attn")
def unscaled_residual(block: Any, _: Any) -> None:
    """The residual side of the merge after attention has no affine map."""
    if "residual_scale" in block.residual.held:
        drop_residual_side(block.residual)


def drop_residual_side(merge: Any) -> None:
    drop(merge, "residual_scale", "residual_bias")
    affine = merge.affine
    merge.affine = lambda x, side: x if side == "residual" else affine(x, side)


def in_blocks(change: Change, model: Model, weights: Weights) -> Model:
    """The model with every block changed."""
    for block in model.layers:
        change(block, weights)
    return model


DEPARTURES: Mapping[str, Departure] = {
    "query-to-output": partial(in_blocks, query_to_output),
    "no-convolution": partial(in_blocks, no_convolution),
    "current-tap": partial(in_blocks, current_tap),
    "skip-large-bias": partial(in_blocks, skip_large_bias),
    "no-means": partial(in_blocks, no_means),
    "no-qk-norm": partial(in_blocks, no_qk_norm),
    "first-temperature": partial(in_blocks, first_temperature),
    "undelayed-value": partial(in_blocks, undelayed_value),
    "silu-router": partial(in_blocks, silu_router),
    "no-router-state": partial(in_blocks, no_router_state),
    "bias-on-logits": partial(in_blocks, bias_on_logits),
    "soft-routing": partial(in_blocks, soft_routing),
    "raw-embedding": raw_embedding,
    "residual-order": partial(in_blocks, residual_order),
    "neighbours-gates": partial(in_blocks, neighbours_gates),
    "unscaled-residual": partial(in_blocks, unscaled_residual),
}
"""All departures, in the order in which they are applied."""
