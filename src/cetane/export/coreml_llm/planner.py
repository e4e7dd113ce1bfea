"""Planners for the functions of CoreML-LLM's packages."""

from collections import Counter
from dataclasses import replace
from typing import Any

from cetane.checkpoint import Checkpoint
from cetane.errors import CetaneError
from cetane.export.coreml_llm.adapter import Adapter, Fresh, Staged, fresh_name
from cetane.export.coreml_llm.contract import (
    CHUNKS,
    DECODE,
    LAST_POSITION,
    PREFILL,
    SHARED,
    SLIDING,
    VERIFY,
    VERIFYING,
    PackageSizes,
    commits,
    theirs,
)
from cetane.export.coreml_llm.refusals import OTHER_RECIPE, refuse
from cetane.families import CacheForm, CacheGroup, Head, ReadOnly
from cetane.planner import CachePlan, FunctionGraph, ModelSource, Planner, by_layer, chunk_bounds
from cetane.schema.function import Function
from cetane.schema.interface import FromTensor, Input, Output, ToTensor
from cetane.schema.recipe import LayoutSection, Mode, Recipe

CHOICES: dict[Mode, tuple[str, ...]] = {
    "decode": ("token_id", "token_logit", "hidden_states_out"),
    "verify": ("token_ids", "hidden_states_out"),
    "prefill": ("token_id", "token_logit"),
}
"""Their names of what the last package gives in place of logits."""


class ContractCaches(CachePlan):
    """Caches of calls that see their own columns, and hand them to the host."""

    def form(self, group: str, tokens: int) -> type[CacheForm]:
        if tokens == 1:
            return super().form(group, tokens)
        return ReadOnly if group == SLIDING else Staged


class PrefillCaches(CachePlan):
    """Caches at the start of a sequence: a call sees only its own columns."""

    def form(self, group: str, tokens: int) -> type[CacheForm]:
        return Fresh

    def visible(self, group: str, tokens: int) -> int:
        return tokens


class ContractPlanner(Planner):
    """Plans the packages that decode, and verify if the recipe does."""

    cache_plan: type[CachePlan] = ContractCaches

    def __init__(
        self, checkpoint: ModelSource, recipe: Recipe, like: Planner | None = None
    ) -> None:
        head = recipe.head.model_copy(update={"choose": False})  # here the adapter chooses
        super().__init__(checkpoint, recipe.model_copy(update={"head": head}), like)

    @property
    def modes(self) -> dict[str, Mode]:
        """The modes of a package's functions, by name. Merged packages only decode, and so do
        those whose verified columns the runtime would write to wrong places."""
        kept = [Counter(group for block in blocks for group in block.keeps)
                for blocks in self.members.values()]  # fmt: skip
        committed = len(self.members) in VERIFYING and commits(kept)
        verifies = self.recipe.tokens.verify and committed
        return {DECODE: "decode", VERIFY: "verify"} if verifies else {"main": "decode"}

    @property
    def names(self) -> dict[str, str]:
        """Their names of the shards."""
        return dict(zip(self.members, CHUNKS[len(self.members)], strict=True))

    def tokens(self, mode: Mode) -> int:
        """Tokens of a call."""
        return self.recipe.tokens.by_mode()[mode]

    def group(self, name: str) -> CacheGroup:
        """The cache group of a kind of layer."""
        return self.memory.groups[name]

    @property
    def first_reader(self) -> int:
        """The first layer that reads the caches of earlier ones; -1 if none does."""
        shared = set(self.model.shared)
        return min(
            (block.layer for block in self.model.layers if shared & set(block.reads)), default=-1
        )

    def sizes(self) -> PackageSizes:
        """The model's sizes in their contract."""
        return PackageSizes(
            hidden=self.model.hidden,
            context=self.recipe.cache.context,
            window=self.memory.slots[SLIDING].count,
            per_layer=self.model.channels["per_layer"],
            kv_heads=self.group(SLIDING).heads,
            dims={name: self.group(name).dim for name in SHARED},
        )

    def inner(self, shard: str, mode: Mode) -> FunctionGraph:
        """cetane's function, up to the hidden state before the head."""
        (segment,) = self.arrangement.segments[shard]
        blocks = tuple(block for block in segment.blocks if not isinstance(block, Head))
        after = self.arrangement.after(segment)
        return self.graph_maker.graph(
            segment, mode, self.tokens(mode), blocks, after, wanted={"hidden"}
        )

    def heads_of(self, shard: str) -> tuple[Head, ...]:
        return tuple(block for block in self.members[shard] if isinstance(block, Head))

    def their_names(self, shard: str, mode: Mode, inner: Function) -> dict[str, str]:
        """Their names of the function's inputs and outputs, by cetane's names."""
        last = bool(self.heads_of(shard))
        made = [o.name for o in inner.outputs if not (last and o.name == "hidden_out")]
        return {name: theirs(name, mode) for name in (*(i.name for i in inner.inputs), *made)}

    def graphs(self, shard: str) -> list[FunctionGraph]:
        return [self._outer(shard, name, mode) for name, mode in self.modes.items()]

    def _outer(self, shard: str, name: str, mode: Mode) -> FunctionGraph:
        inner, tokens = self.inner(shard, mode), self.tokens(mode)
        names = self.their_names(shard, mode, inner.function)
        heads, sizes = self.heads_of(shard), self.sizes()
        owned = {cache.group: cache.layers for cache in inner.caches}
        shapes = sizes.inputs(mode, tokens, owned)
        inputs = {
            names[item.name]: item.model_copy(
                update={"name": names[item.name], "shape": shapes[names[item.name]]}
            )
            for item in inner.function.inputs
        }
        shapes = sizes.outputs(mode, tokens, owned)
        outputs = [
            item.model_copy(update={"name": there, "shape": shapes.get(there, swapped(item.shape))})
            for item in inner.function.outputs
            if (there := names.get(item.name)) is not None
        ]
        if heads:
            outputs += [
                Output(
                    name=there,
                    shape=shapes[there],
                    dtype="int32" if there.startswith("token_id") else "fp16",
                    sink=ToTensor(name=there),
                )
                for there in CHOICES[mode]
            ]
        if heads and mode == "prefill":
            inputs[LAST_POSITION] = Input(
                name=LAST_POSITION, shape=(1, tokens, 1), source=FromTensor(name=LAST_POSITION)
            )
        function = inner.function.model_copy(
            update={"name": name, "inputs": tuple(inputs.values()), "outputs": tuple(outputs)}
        )
        return replace(inner, function=function, blocks=(*inner.blocks, *heads))

    def module(self, graph: FunctionGraph) -> Any:
        function = graph.function
        shard, mode = function.owner, self.modes[function.name]
        inner = self.inner(shard, mode)
        return Adapter(
            super().module(inner),
            function,
            mode,
            self.their_names(shard, mode, inner.function),
            self.heads_of(shard),
            self.memory.slots[SLIDING].count,
        )


class PrefillPlanner(ContractPlanner):
    """Plans the packages that prefill: always four, and the first two own all caches."""

    cache_plan = PrefillCaches

    def __init__(self, checkpoint: ModelSource, recipe: Recipe, like: ContractPlanner) -> None:
        shared, layers = like.first_reader, by_layer(like.model.layers)
        if len(like.members) in VERIFYING:
            cuts = chunk_bounds(recipe.layout, layers)[1:-1]
            cuts = sorted({*cuts, shared}) if len(cuts) == 2 else cuts
        else:  # merged packages say nothing; halves as in the four packages of E2B
            cuts = [-(-shared // 2), shared, (shared + len(layers)) // 2]
        if len(cuts) != 3 or cuts[1] != shared:
            raise CetaneError(
                f"CoreML-LLM's first two prefill packages own all caches: layers up to {shared}, "
                f"but this layout is cut at {', '.join(map(str, cuts))}",
                OTHER_RECIPE,
            )
        layout = LayoutSection(kind="chunks", cuts=tuple(cuts), head="last")
        super().__init__(checkpoint, recipe.model_copy(update={"layout": layout}), like)

    @property
    def modes(self) -> dict[str, Mode]:
        return {"main": "prefill"}

    @property
    def names(self) -> dict[str, str]:
        return dict(zip(self.members, PREFILL, strict=True))

    def their_names(self, shard: str, mode: Mode, inner: Function) -> dict[str, str]:
        """Their names, with keys and values numbered by layer, unless they are handed on."""
        fresh = {}
        seen: Counter[str] = Counter()
        number = 0
        for block in self.members[shard]:
            for group in block.keeps:
                names = [fresh_name(group, part, seen[group]) for part in "kv"]
                seen[group] += 1
                kept = not set(block.writes) & set(self.model.shared)
                for name, part in zip(names, "KV", strict=True):
                    fresh[name] = f"{part}{number}" if kept else None
                number += kept
        plain = inner.model_copy(
            update={"outputs": tuple(o for o in inner.outputs if o.name not in fresh)}
        )
        kept_names = {name: there for name, there in fresh.items() if there is not None}
        return super().their_names(shard, mode, plain) | kept_names


def swapped(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with channels last."""
    *outer, channels, tokens = shape
    return (*outer, tokens, channels)


def planners(checkpoint: Checkpoint, recipe: Recipe) -> list[ContractPlanner]:
    """The planners of the folder's packages.

    Raises CetaneError for another model, and for a layout or contracts that their runtime lacks.
    """
    first = ContractPlanner(checkpoint, recipe)
    refuse(first)
    return [first, *([PrefillPlanner(checkpoint, recipe, first)] if recipe.tokens.prefill else [])]
