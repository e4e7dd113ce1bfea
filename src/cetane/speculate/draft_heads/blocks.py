"""Draft heads as blocks in ANE form. They compute the same as `modules.py`, which trains them."""

from dataclasses import replace

import torch
from torch import nn

from cetane.families import (
    AttentionHeads,
    Axes,
    Block,
    Flow,
    Held,
    Memory,
    Projection,
    RMSNorm,
    Weight,
    apply_rotary,
    attend,
)
from cetane.speculate.draft_heads.modules import TAPS, DraftHeadConfig, Eagle3


class DraftHeadBlock(Block):
    """A block whose weights are tensors of a trained draft head."""

    def __init__(self, name: str, **stored: str) -> None:
        """`stored`: the tensors of projections and norms that have another name."""
        super().__init__(name, 0, "")
        self.stored = {f"{path}.weight": tensor for path, tensor in stored.items()}
        self.rows: dict[str, tuple[int, int, int]] = {}
        """For weights that are some rows of a tensor: the first row, the end, and all its rows."""

    def weight(self, path: str, shape: tuple[int, ...], held: Held) -> Weight:
        weight = Weight(self.stored.get(path, path), shape, held.stored, held.kind)
        if path not in self.rows:
            return weight
        start, stop, whole = self.rows[path]
        return replace(weight, stored=(whole, *held.stored[1:]), rows=(start, stop))


class MedusaBlock(DraftHeadBlock):
    """Makes all tokens of a draft at once: hidden state `(1, C, 1, 1)` -> `(1, R, 1, steps)`.

    The logits have a column for each token, so the output rows are read once.
    """

    reads = ("hidden",)
    writes = ("logits",)

    def __init__(self, config: DraftHeadConfig) -> None:
        super().__init__("medusa", norm="norm", output="output")
        self.axis = Axes().time
        self.norm = RMSNorm(config.hidden, config.eps)
        self.layers = nn.ModuleList(
            Projection(config.hidden, config.hidden, "head", bias=True) for _ in range(config.steps)
        )
        self.output = Projection(config.hidden, config.rows, "head")

    def forward(self, flow: Flow, memory: Memory) -> None:
        x = self.norm(flow["hidden"])
        steps = [x + nn.functional.silu(layer(x)) for layer in self.layers]
        flow["logits"] = self.output(torch.cat(steps, self.axis))


class EagleFuse(DraftHeadBlock):
    """Joins the hidden states of three depths to one."""

    reads = ("features",)

    def __init__(self, config: DraftHeadConfig) -> None:
        super().__init__("fuse")
        self.fuse = Projection(TAPS * config.hidden, config.hidden, "head")

    def forward(self, flow: Flow, memory: Memory) -> None:
        flow["hidden"] = self.fuse(flow["features"])


class EagleKeys(DraftHeadBlock):
    """The keys and values of tokens. Later tokens read nothing else, so a prompt needs no later
    block."""

    reads = ("hidden", "embedded", "rope_cos", "rope_sin")
    writes = ("mixed_in", "keys", "values")
    keeps = ("kv",)

    def __init__(self, config: DraftHeadConfig, heads: AttentionHeads) -> None:
        super().__init__("keys", kv="qkv.weight")
        self.heads, inner = heads, heads.kv * heads.dim
        self.rows = {"kv.weight": (inner, 3 * inner, 3 * inner)}
        self.norm_features = RMSNorm(config.hidden, config.eps)
        self.norm_embedded = RMSNorm(config.hidden, config.eps)
        self.kv = Projection(2 * config.hidden, 2 * inner, "head")

    def forward(self, flow: Flow, memory: Memory) -> None:
        heads, inner = self.heads, self.heads.kv * self.heads.dim
        x = torch.cat([self.norm_embedded(flow["embedded"]), self.norm_features(flow["hidden"])], 1)
        columns = self.kv(x)
        k, v = heads.split(columns[:, :inner], heads.kv), heads.split(columns[:, inner:], heads.kv)
        k = apply_rotary(k, flow["rope_cos"], flow["rope_sin"], heads.dim)
        flow["mixed_in"] = x
        flow["keys"], flow["values"] = memory["kv"](k, v)


class EagleLayer(DraftHeadBlock):
    """The rest of the layer. The next token of a draft takes its output as hidden state."""

    reads = ("hidden", "mixed_in", "keys", "values", "rope_cos", "rope_sin", "mask")

    def __init__(self, config: DraftHeadConfig, heads: AttentionHeads) -> None:
        super().__init__("layer", q="qkv.weight")
        self.heads, hidden, inner = heads, config.hidden, heads.query * heads.dim
        self.rows = {"q.weight": (0, inner, 3 * inner)}
        self.q = Projection(2 * hidden, inner, "head")
        self.out = Projection(inner, hidden, "head")
        self.norm_mlp = RMSNorm(hidden, config.eps)
        self.gate_up = Projection(hidden, 6 * hidden, "head")
        self.down = Projection(3 * hidden, hidden, "head")

    def forward(self, flow: Flow, memory: Memory) -> None:
        heads = self.heads
        q = heads.split(self.q(flow["mixed_in"]), heads.query)
        q = apply_rotary(q, flow["rope_cos"], flow["rope_sin"], heads.dim)
        mixed = attend(q, flow["keys"], flow["values"], flow["mask"], heads)
        h = flow["hidden"] + self.out(heads.merge(mixed))
        gate, up = self.gate_up(self.norm_mlp(h)).chunk(2, 1)
        flow["hidden"] = h + self.down(nn.functional.silu(gate) * up)


class EagleOutput(DraftHeadBlock):
    """Logits of the tokens that the draft head can propose."""

    reads = ("hidden",)
    writes = ("logits",)

    def __init__(self, config: DraftHeadConfig) -> None:
        super().__init__("output", output="output")
        self.norm_output = RMSNorm(config.hidden, config.eps)
        self.output = Projection(config.hidden, config.rows, "head")

    def forward(self, flow: Flow, memory: Memory) -> None:
        flow["logits"] = self.output(self.norm_output(flow["hidden"]))


def attention_heads(config: DraftHeadConfig) -> AttentionHeads:
    """The attention heads of `Eagle3`, each with keys and values of its own."""
    count, dim = max(1, config.hidden // Eagle3.WIDTH), Eagle3.WIDTH
    return AttentionHeads(count, count, dim, dim**-0.5)
