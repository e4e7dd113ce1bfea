"""A recipe resolved against a model: shards, functions, inputs, outputs, states and bytes.

Reads shapes from modules on torch's meta device, never weights.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, Protocol

from pydantic import Field, model_validator

from cetane.errors import CetaneError
from cetane.families import author
from cetane.families.base import Block, Head, Model
from cetane.families.caches import CONTRACTS, CacheSpec
from cetane.families.flow import (
    Data,
    Embedding,
    FromCache,
    FromTensor,
    Input,
    Mask,
    Output,
    Rotary,
    Shape,
    State,
    ToLogits,
    ToTensor,
)
from cetane.families.layers import hidden_shape
from cetane.families.shard import Shard
from cetane.recipe import Mode, Recipe

CONTEXTS = (512, 1024, 2048, 4096, 8192)
"""Context lengths for which a plan states the cache's size, beside the recipe's own."""


class Source(Protocol):
    """What a plan needs of a checkpoint: its config, and which tensors it has."""

    @property
    def source(self) -> str: ...
    @property
    def config(self) -> dict[str, Any]: ...
    def __contains__(self, name: str) -> bool: ...
    def names(self) -> list[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...


class Function(Data):
    """One static graph of a shard, or with flexible shapes the one graph, at its default."""

    name: str
    tokens: int
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]


class ShardPlan(Data):
    """One `.mlpackage`."""

    name: str
    kind: Literal["layers", "head", "model"]
    blocks: tuple[str, ...]
    weight_bytes: int
    functions: tuple[Function, ...]
    states: tuple[State, ...]


class Step(Data):
    """One call: a function of a shard."""

    shard: str
    function: str


class ModePlan(Data):
    """How many tokens a mode takes at a time, and its calls in order."""

    tokens: int = Field(ge=1)
    steps: tuple[Step, ...]


class Plan(Data):
    """What a build makes and an engine runs. Sizes in bytes."""

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
    rotary: tuple[str, ...]
    shards: tuple[ShardPlan, ...]
    modes: dict[Mode, ModePlan]

    @model_validator(mode="after")
    def consistent(self) -> "Plan":
        """What an engine relies on; plans are also read from manifests, which may be hostile."""
        if self.modes.get("decode", None) is None or self.modes["decode"].tokens != 1:
            raise ValueError("no decode mode of one token")
        functions = {(s.name, f.name): f for s in self.shards for f in s.functions}
        for mode, steps in self.modes.items():
            written: set[str] = set()
            rows = 0
            for step in steps.steps:
                if (step.shard, step.function) not in functions:
                    raise ValueError(f"{mode} calls {step.shard}/{step.function}: no such function")
                function = functions[step.shard, step.function]
                caches = {i.source.name for i in function.inputs if isinstance(i.source, FromCache)}
                for item in function.inputs:
                    if isinstance(item.source, FromTensor) and item.source.name not in written:
                        raise ValueError(f"{mode}: nothing writes {item.name} of {step.shard}")
                    if isinstance(item.source, Rotary) and item.source.table not in self.rotary:
                        raise ValueError(f"{mode}: no rotary table {item.source.table}")
                for output in function.outputs:
                    if isinstance(output.sink, ToTensor):
                        written.add(output.sink.name)
                    elif isinstance(output.sink, ToLogits):
                        if output.sink.start != rows or output.sink.stop <= rows:
                            raise ValueError(f"{mode}: logits do not cover the vocabulary in order")
                        rows = output.sink.stop
                    elif output.sink.name not in caches:
                        raise ValueError(f"{mode}: {step.shard} writes a cache it does not read")
            if rows != self.vocab:
                raise ValueError(f"{mode}: {rows} logits for a vocabulary of {self.vocab}")
        return self

    @cached_property
    def by_name(self) -> dict[str, ShardPlan]:
        return {shard.name: shard for shard in self.shards}


class Planner:
    """Resolves one recipe for one checkpoint; keeps the blocks for whoever builds or runs them."""

    def __init__(self, checkpoint: Source, recipe: Recipe) -> None:
        self.checkpoint, self.recipe = checkpoint, recipe
        layers, tensors = checkpoint.config.get("num_hidden_layers"), len(checkpoint.names())
        if isinstance(layers, int) and layers > tensors:  # before a module is made for each
            raise CetaneError(
                f"{checkpoint.source}: the config says {layers} layers, "
                f"but there are only {tensors} tensors"
            )
        self.model: Model = author(checkpoint.config, recipe.tensor_layout)
        if recipe.cache.context > self.model.max_context:
            raise CetaneError(
                f"cache.context = {recipe.cache.context}: {checkpoint.source} was trained for "
                f"{self.model.max_context} positions"
            )
        self.contract = CONTRACTS[recipe.cache.contract]
        self.heads = self.model.heads(recipe.head.slices)
        self.members = self._members()
        self._check_tensors()

    def _members(self) -> dict[str, tuple[Block, ...]]:
        """Blocks of every shard, by shard name, in the order of their calls."""
        layers, heads = self.model.layers, self.heads
        layout = self.recipe.layout
        if layout.kind == "single":
            return {"model": (*layers, *heads)}
        if layout.kind == "per-block":
            shards: dict[str, tuple[Block, ...]] = {layer.name: (layer,) for layer in layers}
        else:
            count = layout.chunks or min(4, len(layers))
            if count > len(layers):
                raise CetaneError(f"layout.chunks = {count}: the model has {len(layers)} layers")
            bounds = [len(layers) * i // count for i in range(count + 1)]
            shards = {
                f"chunk-{i:02}": layers[start:stop]
                for i, (start, stop) in enumerate(pairwise(bounds))
            }
        return shards | {head.name: (head,) for head in heads}

    def _check_tensors(self) -> None:
        """Every weight is in the checkpoint, fits its format, and every rule matches something."""
        kinds: dict[str, str] = {}
        table = (self.model.vocab, self.model.hidden)
        self._check_shape(self.model.embedding, table)
        for block in (*self.model.layers, *self.heads):
            for _, weight in block.weights():
                sliced = isinstance(block, Head) and weight.kind
                self._check_shape(weight.name, table if sliced else weight.stored_shape)
                if weight.kind:
                    kinds[weight.name] = weight.kind
                    selected = self.recipe.compression.format_for(weight.name, weight.kind)
                    selected.check(weight.shape, weight.name)
        self.recipe.compression.check(kinds)

    def _check_shape(self, name: str, wanted: Shape) -> None:
        if name not in self.checkpoint:
            raise CetaneError(f"{self.checkpoint.source}: no tensor {name}")
        stored = tuple(self.checkpoint.shape(name))
        if stored != wanted:
            raise CetaneError(
                f"{self.checkpoint.source}: {name} has shape {stored}, the config says {wanted}"
            )

    def specs(self, shard: str) -> list[CacheSpec]:
        """The cache groups of a shard."""
        owners = [block.group for block in self.members[shard] if block.group]
        return [
            CacheSpec(
                shard, group, owners.count(group),
                self.model.groups[group].heads, self.model.groups[group].dim,
                self.recipe.cache.context,
            )
            for group in dict.fromkeys(owners)
        ]  # fmt: skip

    def function(self, shard: str, name: str, tokens: int) -> Function:
        """Inputs and outputs of a shard for `tokens` tokens per call."""
        blocks = self.members[shard]
        made = {name for block in self._before(shard) for name in block.writes}
        inputs: dict[str, Input] = {}
        inside: set[str] = set()
        for block in blocks:
            for read in block.reads:
                if read not in inside and read not in inputs:
                    inputs[read] = self._input(read, tokens, made)
            inside |= set(block.writes)
        outputs: list[Output] = []
        if not isinstance(blocks[-1], Head):
            shape = hidden_shape(self.model.order, self.model.hidden, tokens)
            outputs.append(Output(name="hidden_out", shape=shape, sink=ToTensor(name="hidden")))
        for spec in self.specs(shard):
            for item in self.contract.inputs(spec, tokens):
                inputs[item.name] = item
            outputs += self.contract.outputs(spec, tokens)
        for block in blocks:
            if isinstance(block, Head):
                index = block.name.removeprefix("head-")
                shape = hidden_shape(self.model.order, block.stop - block.start, tokens)
                sink = ToLogits(start=block.start, stop=block.stop)
                outputs.append(Output(name=f"logits_{index}", shape=shape, sink=sink))
        return Function(
            name=name, tokens=tokens, inputs=tuple(inputs.values()), outputs=tuple(outputs)
        )

    def _before(self, shard: str) -> list[Block]:
        names = list(self.members)
        return [b for name in names[: names.index(shard)] for b in self.members[name]]

    def _input(self, name: str, tokens: int, made: set[str]) -> Input:
        """A tensor that a block reads: from an earlier shard when one made it, else the host."""
        hidden = hidden_shape(self.model.order, self.model.hidden, tokens)
        if name in made:
            return Input(name=name, shape=hidden, source=FromTensor(name=name))
        source = self.model.host[name]
        shape: Shape
        if isinstance(source, Embedding):
            shape = hidden
        elif isinstance(source, Rotary):
            dim = 2 * self.model.rotary[source.table].inverse_frequencies.numel()
            shape = (1, 1, dim, tokens)
        else:
            assert isinstance(source, Mask)
            keys = self.contract.visible(self.recipe.cache.context, tokens)
            shape = (1, 1, tokens, keys)
        return Input(name=name, shape=shape, source=source)

    def module(self, shard: str, tokens: int) -> Shard:
        """The torch module of a shard for `tokens` tokens per call; its blocks are shared."""
        function = self.function(shard, "main", tokens)
        return Shard(
            self.members[shard],
            self.recipe.cache.contract,
            self.specs(shard),
            self.model.groups,
            function.inputs,
            function.outputs,
        )

    def plan(self) -> Plan:
        """The whole plan."""
        modes, widths = self.recipe.tokens.by_mode(), self.function_widths()
        shards = tuple(self._shard(name, blocks) for name, blocks in self.members.items())
        sizes, bits = [], []
        for block in (*self.model.layers, *self.heads):
            for _, weight in block.weights():
                if weight.kind:
                    chosen = self.recipe.compression.format_for(weight.name, weight.kind)
                    sizes.append(weight.elements)
                    bits.append(weight.elements * chosen.bits)
        contexts = {c for c in CONTEXTS if c <= self.model.max_context}
        groups = [self.model.groups[layer.group] for layer in self.model.layers if layer.group]
        slot = sum(2 * 2 * group.heads * group.dim for group in groups)
        return Plan(
            architecture=str(self.checkpoint.config["model_type"]),
            recipe=self.recipe,
            hidden=self.model.hidden,
            vocab=self.model.vocab,
            layers=len(self.model.layers),
            embedding_bytes=2 * self.model.vocab * self.model.hidden,
            weight_bytes=sum(shard.weight_bytes for shard in shards),
            mean_bits=sum(bits) / sum(sizes),
            kv_bytes={
                context: slot * context
                for context in sorted(contexts | {self.recipe.cache.context})
            },
            rotary=tuple(self.model.rotary),
            shards=shards,
            modes={
                mode: ModePlan(
                    tokens=tokens,
                    steps=tuple(
                        Step(shard=name, function="main" if "main" in widths else mode)
                        for name in self.members
                    ),
                )
                for mode, tokens in modes.items()
            },
        )

    def function_widths(self) -> dict[str, int]:
        """Tokens per call of every function of a shard, by its name: one per mode, or one `main`
        that a flexible shape makes fit all modes."""
        modes = self.recipe.tokens.by_mode()
        return (
            {"main": 1}
            if self.recipe.tokens.shapes == "range"
            else {str(m): t for m, t in modes.items()}
        )

    def _shard(self, name: str, blocks: Sequence[Block]) -> ShardPlan:
        kinds = {isinstance(block, Head) for block in blocks}
        return ShardPlan(
            name=name,
            kind="model" if len(kinds) == 2 else "head" if kinds == {True} else "layers",
            blocks=tuple(block.name for block in blocks),
            weight_bytes=sum(self._weight_bytes(block) for block in blocks),
            functions=tuple(
                self.function(name, function, tokens)
                for function, tokens in self.function_widths().items()
            ),
            states=tuple(s for spec in self.specs(name) for s in self.contract.states(spec)),
        )

    def _weight_bytes(self, block: Block) -> int:
        formats = self.recipe.compression
        return sum(
            formats.format_for(weight.name, weight.kind).nbytes(weight.shape)
            if weight.kind
            else 2 * weight.elements
            for _, weight in block.weights()
        )
