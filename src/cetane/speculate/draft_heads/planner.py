"""Which functions the shard of a draft head has, and what goes into and out of them.

Medusa: `draft`, all heads of one hidden state. EAGLE-3: `follow` takes tokens that are certain (as
many as a verifying call may accept) and the hidden states before them, `read` does so for a prompt
and keeps its keys and values only, `draft` goes on from the head's own output, one token a call.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cetane.families import (
    Axes,
    Block,
    CacheGroup,
    CacheSpec,
    EmbeddingTable,
    Model,
    ReadOnly,
    RotaryTable,
    Shard,
    tensor_layout,
)
from cetane.planner import FunctionGraph
from cetane.schema.function import Function
from cetane.schema.interface import (
    Embedding,
    FromTensor,
    Input,
    Mask,
    Output,
    Rotary,
    ToTensor,
)
from cetane.schema.plan import Plan
from cetane.schema.recipe import Cache, Recipe, Tokens
from cetane.schema.slots import Slots
from cetane.speculate.draft_heads.blocks import (
    EagleFuse,
    EagleKeys,
    EagleLayer,
    EagleOutput,
    MedusaBlock,
    attention_heads,
)
from cetane.speculate.draft_heads.modules import TAPS, THETA, DraftHeadConfig, TorchDraftHead

GROUP = "kv"
ROTARY = "default"


class Unseen(ReadOnly):
    """Columns for the cache that nothing looks at in their own call."""

    def __init__(self, spec: CacheSpec, tensors: dict[str, Tensor]) -> None:
        self.spec, self.written = spec, []

    @classmethod
    def inputs(cls, spec: CacheSpec, tokens: int) -> list[Input]:
        return []

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.written.append((k, v))
        return k, v


class DraftHeadPlanner:
    """The programs of a draft head for a bundle of some plan, as lowering wants them."""

    def __init__(self, config: DraftHeadConfig, plan: Plan) -> None:
        self.config, self.name = config, config.kind
        target, context = plan.recipe, plan.recipe.cache.context
        self.recipe = Recipe(
            name=config.kind,
            tensor_layout=target.tensor_layout,
            cache=Cache(context=context),
            tokens=Tokens(verify=None, prefill=None),
            target=target.target,
        )
        with tensor_layout(target.tensor_layout):
            self.axes, self.heads = Axes(), attention_heads(config)
        self.slots = Slots(contract="readonly", count=context)
        self.rotary = RotaryTable(
            THETA ** -(torch.arange(self.heads.dim // 2) / (self.heads.dim // 2))
        )
        wider = sorted({mode.tokens for mode in plan.modes.values() if mode.tokens > 1})
        self.follows = wider[0] if wider else 1
        """Tokens of a call that follows what was accepted, and of one that reads a prompt."""
        self.reads = wider[-1] if wider else 1
        with torch.device("meta"), tensor_layout(target.tensor_layout):
            blocks: tuple[Block, ...]
            if config.kind == "medusa":
                blocks = (MedusaBlock(config),)
            else:
                keys, layer = EagleKeys(config, self.heads), EagleLayer(config, self.heads)
                blocks = (EagleFuse(config), keys, layer, EagleOutput(config))
        self.members: Mapping[str, tuple[Block, ...]] = {self.name: blocks}

    @property
    def caches(self) -> dict[str, Slots]:
        """The cache groups of the head: EAGLE-3's layer has one."""
        return {} if self.config.kind == "medusa" else {GROUP: self.slots}

    @property
    def functions(self) -> tuple[Function, ...]:
        return tuple(graph.function for graph in self.graphs(self.name))

    @property
    def weight_bytes(self) -> int:
        """fp16, each weight once."""
        return sum(2 * w.elements for b in self.members[self.name] for _, w in b.weights())

    def graphs(self, shard: str) -> list[FunctionGraph]:
        blocks = self.members[shard]
        if self.config.kind == "medusa":
            return [self.medusa(blocks)]
        wide = [self.eagle("read", self.reads, blocks[:2])] if self.reads > self.follows else []
        follow = self.eagle("follow", self.follows, blocks)
        return [follow, *wide, self.eagle("draft", 1, blocks[1:])]

    def widest(self, shard: str) -> list[FunctionGraph]:
        return self.graphs(shard)

    def module(self, graph: FunctionGraph) -> Shard:
        model = Model(
            axes=self.axes,
            hidden=self.config.hidden,
            vocab=self.config.rows,
            eps=self.config.eps,
            layers=self.members[self.name],
            embedding=EmbeddingTable(""),
            norm="norm",
            output="output",
            host={},
            memory={GROUP: CacheGroup(self.heads.query, self.heads.kv, self.heads.dim)},
            rotary={ROTARY: self.rotary},
            max_context=self.recipe.cache.context,
            channels={},
        )
        function = graph.function
        return Shard(model, graph.blocks, graph.caches, (), function.inputs, function.outputs)

    def medusa(self, blocks: Sequence[Block]) -> FunctionGraph:
        function = Function(
            name="draft",
            owner=self.name,
            tokens=1,
            inputs=(self.tensor("hidden", self.config.hidden, 1),),
            outputs=(self.made("logits", self.config.rows, self.config.steps),),
        )
        return FunctionGraph(function, tuple(blocks), (), ())

    def eagle(self, name: str, tokens: int, blocks: Sequence[Block]) -> FunctionGraph:
        """A function of some of the blocks; without the layer nothing looks at keys."""
        hidden, looks = self.config.hidden, any(isinstance(b, EagleLayer) for b in blocks)
        fuses = any(isinstance(b, EagleFuse) for b in blocks)
        count, dim = self.slots.count, self.heads.dim
        spec = CacheSpec(
            self.name, GROUP, 1, self.heads.kv, dim, count, ReadOnly if looks else Unseen
        )
        inputs = [
            self.tensor("features", TAPS * hidden, tokens)
            if fuses
            else self.tensor("hidden", hidden, tokens),
            Input(name="embedded", shape=self.shape(hidden, tokens), source=Embedding()),
            *(
                Input(
                    name=f"rope_{part}",
                    shape=(1, 1, dim, tokens),
                    source=Rotary(table=ROTARY, part=part),
                )
                for part in ("cos", "sin")
            ),
        ]
        outputs = []
        if looks:
            shape = (1, 1, tokens, self.slots.visible(tokens))
            inputs.append(Input(name="mask", shape=shape, source=Mask(group=GROUP)))
            outputs.append(self.made("hidden", hidden, tokens))
            outputs.append(self.made("logits", self.config.rows, tokens))
        function = Function(
            name=name,
            owner=self.name,
            tokens=tokens,
            inputs=(*inputs, *spec.form.inputs(spec, tokens)),
            outputs=(*outputs, *spec.form.outputs(spec, tokens)),
        )
        return FunctionGraph(function, tuple(blocks), (spec,), ())

    def shape(self, channels: int, tokens: int) -> tuple[int, ...]:
        return self.axes.shape(channels, tokens)

    def tensor(self, name: str, channels: int, tokens: int) -> Input:
        source = FromTensor(name=name)
        return Input(name=name, shape=self.shape(channels, tokens), source=source)

    def made(self, name: str, channels: int, tokens: int) -> Output:
        shape = self.shape(channels, tokens)
        return Output(name=f"{name}_out", shape=shape, sink=ToTensor(name=name))


class DraftHeadWeights:
    """A trained head as a checkpoint of its shard."""

    def __init__(self, head: TorchDraftHead) -> None:
        self.tensors: dict[str, Any] = head.state_dict()

    def read(self, name: str) -> Tensor:
        found: Tensor = self.tensors[name]
        return found

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        return self.read(name)[start:stop]
