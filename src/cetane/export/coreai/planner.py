"""Planners for the functions of an asset."""

from cetane.checkpoint import Checkpoint
from cetane.errors import CetaneError
from cetane.export.coreai import contract
from cetane.export.coreai.adapter import CoreAIAdapter, StateRows
from cetane.export.refusals import (
    ANY_BUNDLE,
    refuse_distances,
    refuse_int4_rows,
    refuse_int8_caches,
    refuse_streaming,
)
from cetane.families import CacheForm, CacheGroup, CacheSpec, Head
from cetane.planner import CachePlan, FunctionGraph, ModelSource, Planner, Segment
from cetane.schema.interface import Mask, State
from cetane.schema.recipe import CacheSection, LayoutSection, Recipe, TokensSection
from cetane.schema.slots import Slots


class SharedStates(CachePlan):
    """Two states with a row for every layer, as long as the context whatever a layer sees."""

    def _slots(self, group: CacheGroup, context: int) -> Slots:
        return Slots(contract="stateful", count=context)

    def form(self, group: str, tokens: int) -> type[CacheForm]:
        return StateRows

    def visible(self, group: str, tokens: int) -> int:
        return self.slots[group].count

    def caches(self, segment: Segment, tokens: int) -> tuple[CacheSpec, ...]:
        counts = self._kept_groups(segment.blocks)
        specs, first = [], 0
        for name, layers in counts.items():
            group, slots = self.groups[name], self.slots[name].count
            shape = (sum(counts.values()), 1, group.heads * group.dim, 1, slots)
            specs.append(
                CacheSpec(
                    owner=segment.owner,
                    group=name,
                    layers=layers,
                    heads=group.heads,
                    dim=group.dim,
                    slots=slots,
                    form=StateRows,
                    state=State(name="states", shape=shape),
                    first=first,
                )
            )
            first += layers
        return tuple(specs)


class StaticPlanner(Planner):
    """Plans the functions of one context: `extend` with logits, `prompt_opt` without."""

    cache_plan = SharedStates

    def __init__(
        self, checkpoint: ModelSource, recipe: Recipe, like: Planner | None = None
    ) -> None:
        """`recipe` is the bundle's; its context may differ."""
        super().__init__(checkpoint, adapted(recipe), like)

    @property
    def sizes(self) -> contract.Sizes:
        """The sizes in the contract's shapes."""
        group = next(iter(self.memory.groups.values()))
        return contract.Sizes(
            layers=sum(len(block.keeps) for block in self.model.layers),
            channels=group.heads * group.dim,
            hidden=self.model.hidden,
            vocabulary=self.model.vocab,
        )

    def graphs(self, shard: str) -> list[FunctionGraph]:
        (segment,) = self.arrangement.segments[shard]
        layers = tuple(block for block in segment.blocks if not isinstance(block, Head))
        context = self.recipe.cache.context
        return [
            self.graph_maker.graph(
                segment, contract.call_name(kind, context, width), width, blocks, ()
            )
            for kind, blocks in ((contract.EXTEND, segment.blocks), (contract.PROMPT, layers))
            for width in contract.WIDTHS[kind]
        ]

    def wrapped(self, graph: FunctionGraph, positions: int) -> CoreAIAdapter:
        """The torch module of a function, with rotary tables for `positions` positions."""
        shard = self.module(graph)
        used = {item.source.table for item in shard.inputs if item.source.host == "rotary"}
        rotary = {name: table for name, table in self.model.rotary.items() if name in used}
        return CoreAIAdapter(shard, rotary, positions, self.model.softcap)


def adapted(recipe: Recipe) -> Recipe:
    """A recipe with the layout and caches of the contract: one program, states, no choice."""
    content = {
        "tensor_layout": "c1t",
        "layout": LayoutSection(kind="single"),
        "cache": CacheSection(contract="stateful", context=recipe.cache.context, windowed=False),
        "tokens": TokensSection(verify=None, prefill=None),
        "head": recipe.head.model_copy(update={"choose": False}),
        "embedding": recipe.embedding.model_copy(update={"inside": False}),
    }
    return recipe.model_copy(update=content)


def planners(checkpoint: Checkpoint, recipe: Recipe) -> list[StaticPlanner]:
    """A planner for each context, the longest last.

    Raises CetaneError for a model or a recipe that the contract cannot hold.
    """
    refuse_int8_caches(recipe, "Core AI's host")
    refuse_int4_rows(recipe, "Core AI's host", "int8 or fp16")
    refuse_streaming(recipe, "Core AI's host")
    made: list[StaticPlanner] = []
    for context in contract.contexts(recipe.cache.context):
        cache = recipe.cache.model_copy(update={"context": context})
        shorter = recipe.model_copy(update={"cache": cache})
        made.append(StaticPlanner(checkpoint, shorter, made[0] if made else None))
    refuse(made[-1])
    return made


def refuse(planner: StaticPlanner) -> None:
    """Raise CetaneError for a plan that the contract cannot hold."""
    model, kind = planner.model, planner.checkpoint.config["model_type"]
    groups = planner.memory.groups
    if len(groups) != len(model.memory):
        raise CetaneError(
            f"Core AI's contract has no place for the histories of {kind}", ANY_BUNDLE
        )
    if model.shared or model.tables:
        raise CetaneError(
            f"Core AI's contract (metadata 0.2) has no place for what {kind} reads beside "
            "its embedding and caches",
            ANY_BUNDLE,
        )
    if len({(group.heads, group.dim) for group in groups.values()}) != 1:
        raise CetaneError(
            f"Core AI's contract has one shape of caches; layers of {kind} differ", ANY_BUNDLE
        )
    if planner.sizes.channels % contract.INTERLEAVE:
        raise CetaneError(
            f"Core AI's caches interleave {contract.INTERLEAVE} channels; keys of {kind} have "
            f"{planner.sizes.channels}",
            ANY_BUNDLE,
        )
    if planner.recipe.head.subset is not None:
        raise CetaneError("Core AI's host needs logits of all tokens", "port without head.subset")
    refuse_distances(model, "Core AI's host")
    if any(isinstance(s, Mask) and s.sinks for s in model.host.values()):
        raise CetaneError(
            "Core AI's host makes a causal mask; it cannot keep the first tokens in a window",
            "port without family.sinks",
        )
