"""A recipe resolved against a model: shards, functions, inputs, outputs, states and bytes.

Pure data, without torch: an engine runs it, a manifest holds it.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from cetane.errors import CetaneError
from cetane.schema.check import (
    ModeCheck,
    check_adapter,
    check_caches,
    check_capacities,
    check_tables,
)
from cetane.schema.function import (
    AdapterName,
    AdapterPlan,
    CapacityPlan,
    Function,
    ModePlan,
    ShardPlan,
    TablePlan,
)
from cetane.schema.recipe import Mode, Recipe
from cetane.schema.slots import Slots
from cetane.validation import Data

if TYPE_CHECKING:
    from cetane.schema.subset import Ids


class Plan(Data):
    """Everything that a build makes and an engine runs. Sizes are in bytes."""

    architecture: str
    recipe: Recipe
    hidden: int
    vocab: int
    layers: int
    embedding_bytes: int
    weight_bytes: int
    mean_bits: float
    """Bits per weight, scales and palettes not counted."""
    kv_bytes: dict[int, int]
    """Key/value cache of the whole model, by context length."""
    kv_padding: int = Field(default=0, ge=0)
    """Bytes of that cache, at the recipe's context, that only pad a state's rows."""
    caches: dict[str, Slots]
    """Slots of every cache group, by its name."""
    softcap: float | None = Field(default=None, gt=0)
    """The bound c of logits: the host computes c * tanh(x / c). None without one, and for a head
    that applies it."""
    rotary: tuple[str, ...]
    tables: dict[str, TablePlan]
    """Tables with a row for each token. `tokens` is the embedding, unless a shard holds it."""
    shards: tuple[ShardPlan, ...]
    modes: dict[Mode, ModePlan]
    adapters: dict[AdapterName, AdapterPlan] = Field(
        default_factory=dict, exclude_if=lambda adapters: not adapters
    )
    """Adapters that share the base's weights, by their names."""
    smaller: tuple[CapacityPlan, ...] = Field(default=(), exclude_if=lambda smaller: not smaller)
    """Capacities below the context, ascending. `caches` and `modes` are those of the context."""

    @model_validator(mode="after")
    def consistent(self) -> Plan:
        """Check what an engine relies on: plans also come from manifests, which may be hostile."""
        if self.modes.get("decode", None) is None or self.modes["decode"].tokens != 1:
            raise ValueError("no decode mode of one token")
        if len(self.functions) != sum(len({f.name for f in s.functions}) for s in self.shards):
            raise ValueError("two shards have one name")
        if len(self.functions) != sum(len(s.functions) for s in self.shards):
            raise ValueError("two functions of a shard have one name")
        if self.recipe.cache.context not in self.kv_bytes:
            raise ValueError(f"kv_bytes: none at {self.recipe.cache.context} tokens")
        subset = self.recipe.head.subset
        if subset is not None and subset.vocabulary != self.vocab:
            raise ValueError(f"a subset of {subset.vocabulary} tokens, but a model of {self.vocab}")
        tokens = TablePlan(rows=self.vocab, channels=self.hidden)
        if self.tables.get("tokens", tokens) != tokens:
            raise ValueError(f"the table of tokens is not {self.vocab} by {self.hidden}")
        check_tables(self)
        for mode, steps in self.modes.items():
            ModeCheck(self, mode).steps(steps)
        for name, adapter in self.adapters.items():
            check_adapter(self, name, adapter)
        check_caches(self.caches, [f for f in self.functions.values() if f.capacity is None])
        check_capacities(self)
        return self

    @property
    def rows(self) -> int:
        """Rows of the head: the number of tokens that it can choose."""
        subset = self.recipe.head.subset
        return self.vocab if subset is None else len(subset.ids)

    def tokens(self, start: int, stop: int) -> slice | Ids:
        """The tokens of the head's rows from `start` to `stop`."""
        subset = self.recipe.head.subset
        return slice(start, stop) if subset is None else subset.ids[start:stop]

    @cached_property
    def choosable(self) -> Ids:
        """The tokens that the head can choose, one for each of its rows."""
        import numpy as np

        return np.arange(self.vocab)[self.tokens(0, self.rows)]

    @cached_property
    def functions(self) -> dict[tuple[str, str], Function]:
        """Functions by shard and name. A process loads at most this many."""
        return {(s.name, f.name): f for s in self.shards for f in s.functions}

    @property
    def plain_modes(self) -> list[Mode]:
        """The modes of generation without drafts: all but `verify`."""
        return [mode for mode in self.modes if mode != "verify"]

    @property
    def copies(self) -> bool:
        """Whether a host can copy a sequence's memory: it cannot copy a backend's states."""
        return not any(function.states for function in self.functions.values())

    @property
    def forgets(self) -> bool:
        """Whether a session cannot go back to its earlier tokens."""
        return any(slots.forgets for slots in self.caches.values())

    def on(self, adapter: str | None) -> Plan:
        """The plan whose modes include an adapter; the plan itself for None.

        Raises CetaneError for no such adapter.
        """
        if adapter is None:
            return self
        if adapter not in self.adapters:
            known = ", ".join(self.adapters) or "none"
            keeps = "cetane port MODEL --adapter NAME=FOLDER keeps adapters beside a model"
            raise CetaneError(
                f"no adapter {adapter!r}; known: {known}", None if self.adapters else keeps
            )
        smaller = tuple(
            one.model_copy(update={"modes": one.adapters[adapter]}) for one in self.smaller
        )
        return self.model_copy(update={"modes": self.adapters[adapter].modes, "smaller": smaller})

    @property
    def capacities(self) -> tuple[CapacityPlan, ...]:
        """Every capacity, ascending; the last is the context."""
        context = CapacityPlan(
            tokens=self.recipe.cache.context,
            caches=self.caches,
            modes=self.modes,
            adapters={name: adapter.modes for name, adapter in self.adapters.items()},
        )
        return (*self.smaller, context)

    def at(self, tokens: int) -> Plan:
        """The plan of one capacity alone: a sequence has room for so many tokens.

        Raises CetaneError for a capacity that the plan lacks.
        """
        known = {one.tokens: one for one in self.capacities}
        if tokens not in known:
            raise CetaneError(f"no capacity {tokens}; known: {', '.join(map(str, known))}")
        one, cache = known[tokens], self.recipe.cache
        adapters = {
            name: adapter.model_copy(update={"modes": one.adapters[name]})
            for name, adapter in self.adapters.items()
        }
        only = cache.model_copy(update={"context": tokens, "capacities": ()})
        return self.model_copy(
            update={
                "recipe": self.recipe.model_copy(update={"cache": only}),
                "caches": one.caches,
                "modes": one.modes,
                "adapters": adapters,
                "smaller": (),
            }
        )

    @cached_property
    def by_name(self) -> dict[str, ShardPlan]:
        return {shard.name: shard for shard in self.shards}
