"""The planner of a draft head's shard: its functions, with their inputs and outputs.

Medusa has one function: `draft` makes all tokens of a draft from one hidden state. EAGLE-3 has
three. `follow` takes accepted tokens, as many as a verifying call has, and the hidden states before
them. `read` does this for a prompt; it keeps keys and values, and gives no logits. `draft`
continues from the draft head's own output, one token a call.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from cetane.compress import Selection
from cetane.families import (
    Block,
    CacheGroup,
    CacheSpec,
    Model,
    ReadOnly,
    RotaryTable,
    Shard,
    StoredTable,
    tensor_layout,
)
from cetane.planner import CachePlan, FunctionGraph, GraphMaker, Segment
from cetane.planner.weights import weight_bytes
from cetane.schema.function import Function
from cetane.schema.interface import Embedding, Input, Mask, Rotary
from cetane.schema.plan import Plan
from cetane.schema.recipe import CacheSection, Recipe, TokensSection
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


class WriteOnly(ReadOnly):
    """A cache that a call only writes: no query of the call reads the new columns."""

    def __init__(self, spec: CacheSpec, tensors: dict[str, Tensor]) -> None:
        self.spec, self.written = spec, []

    @classmethod
    def inputs(cls, spec: CacheSpec, tokens: int) -> list[Input]:
        return []

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.written.append((k, v))
        return k, v


class DraftHeadCaches(CachePlan):
    """A call whose blocks have no queries does not read the past."""

    def caches(self, segment: Segment, tokens: int) -> tuple[CacheSpec, ...]:
        caches = super().caches(segment, tokens)
        if any(isinstance(block, EagleLayer) for block in segment.blocks):
            return caches
        return tuple(replace(cache, form=WriteOnly) for cache in caches)


class DraftHeadPlanner:
    """The programs of a draft head, for lowering; the bundle has the plan `plan`."""

    def __init__(self, config: DraftHeadConfig, plan: Plan) -> None:
        self.config, self.name = config, config.kind
        target = plan.recipe
        self.recipe = Recipe(
            name=config.kind,
            tensor_layout=target.tensor_layout,
            cache=CacheSection(context=target.cache.context),
            tokens=TokensSection(verify=None, prefill=None),
            compression=Selection(default=config.weights),
            target=target.target,
        )
        wider = sorted({mode.tokens for mode in plan.modes.values() if mode.tokens > 1})
        self.follows = wider[0] if wider else 1
        """Tokens of a call that follows accepted tokens."""
        self.reads = wider[-1] if wider else 1
        """Tokens of a call for a prompt."""
        with torch.device("meta"), tensor_layout(target.tensor_layout):
            blocks = medusa_blocks(config) if config.kind == "medusa" else eagle_blocks(config)
            self.model = draft_head_model(config, blocks, target.cache.context)
        self.members: Mapping[str, tuple[Block, ...]] = {self.name: blocks}
        self.memory = DraftHeadCaches(self.model, self.recipe, f"the {self.name} draft head")

    @property
    def caches(self) -> dict[str, Slots]:
        """The cache groups of the draft head. Only EAGLE-3's layer has one."""
        return dict(self.memory.slots)

    @property
    def functions(self) -> tuple[Function, ...]:
        return tuple(graph.function for graph in self.graphs(self.name))

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, each counted once."""
        return weight_bytes(self.members[self.name], self.recipe.compression)

    def graphs(self, shard: str) -> list[FunctionGraph]:
        blocks = self.members[shard]
        if self.config.kind == "medusa":
            return [self._medusa(blocks)]
        wide = [self._graph("read", self.reads, blocks[:2])] if self.reads > self.follows else []
        follow = self._graph("follow", self.follows, blocks)
        return [follow, *wide, self._graph("draft", 1, blocks[1:])]

    def widest(self, shard: str) -> list[FunctionGraph]:
        return self.graphs(shard)

    def module(self, graph: FunctionGraph) -> Shard:
        function = graph.function
        return Shard(self.model, graph.blocks, graph.caches, (), function.inputs, function.outputs)

    def _graph(self, name: str, tokens: int, blocks: tuple[Block, ...]) -> FunctionGraph:
        """A function of some blocks. Its outputs are logits and a hidden state, if they make
        any."""
        segment = Segment(self.name, "", blocks)
        given = {"features", "hidden"}  # from the target, or from the call before
        wanted = {"logits", "hidden"} if isinstance(blocks[-1], EagleOutput) else {"logits"}
        maker = GraphMaker(self.model, self.memory)
        return maker.make(segment, name, tokens, blocks, given, wanted)

    def _medusa(self, blocks: tuple[Block, ...]) -> FunctionGraph:
        """The function from one hidden state to a column of logits for every drafted token."""
        graph = self._graph("draft", 1, blocks)
        (logits,) = graph.function.outputs
        shape = self.model.axes.shape(self.config.rows, self.config.steps)
        widened = logits.model_copy(update={"shape": shape})
        return replace(graph, function=graph.function.model_copy(update={"outputs": (widened,)}))


def medusa_blocks(config: DraftHeadConfig) -> tuple[Block, ...]:
    return (MedusaBlock(config),)


def eagle_blocks(config: DraftHeadConfig) -> tuple[Block, ...]:
    heads = attention_heads(config)
    keys, layer = EagleKeys(config, heads), EagleLayer(config, heads)
    return (EagleFuse(config), keys, layer, EagleOutput(config))


def draft_head_model(config: DraftHeadConfig, blocks: tuple[Block, ...], context: int) -> Model:
    """A draft head as a model. Its vocabulary are the tokens that it can propose."""
    heads = attention_heads(config)
    group = CacheGroup(heads.query, heads.kv, heads.dim)
    with torch.device("cpu"):
        places = torch.arange(heads.dim // 2)
        rotary = RotaryTable(THETA ** -(places / (heads.dim // 2)))
    return Model(
        hidden=config.hidden,
        vocab=config.rows,
        eps=config.eps,
        layers=blocks,
        embedding=StoredTable(""),  # the target's
        norm="norm",
        output="output",
        host={
            "embedded": Embedding(),
            "rope_cos": Rotary(table=ROTARY, part="cos"),
            "rope_sin": Rotary(table=ROTARY, part="sin"),
            "mask": Mask(group=GROUP),
        },
        memory={} if config.kind == "medusa" else {GROUP: group},
        rotary={ROTARY: rotary},
        max_context=context,
        channels={
            "features": TAPS * config.hidden,
            "embedded": config.hidden,
            "hidden": config.hidden,
            "logits": config.rows,
        },
    )


class DraftHeadWeights:
    """A trained draft head as the checkpoint of its shard."""

    def __init__(self, head: TorchDraftHead) -> None:
        self.tensors: dict[str, Tensor] = head.state_dict()

    def read(self, name: str) -> Tensor:
        return self.tensors[name]

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        return self.read(name)[start:stop]
