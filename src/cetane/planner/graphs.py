"""The graphs of functions: their blocks, inputs, outputs, caches and histories."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from cetane.families import Block, CacheSpec, Head, HistorySpec, MatrixSpec, Model, RoutedBlock
from cetane.planner.calls import FILL, Calls
from cetane.planner.layout import Arrangement, Segment, needed
from cetane.planner.memory import CachePlan
from cetane.schema.function import Function
from cetane.schema.interface import (
    Embedding,
    FromTensor,
    Input,
    Mask,
    Output,
    PositionRows,
    Rotary,
    Shape,
    ToChoice,
    TokenIds,
    ToLogits,
    ToTensor,
    choice_block,
)
from cetane.schema.recipe import Choosing


@dataclass(frozen=True)
class FunctionGraph:
    """One function, with the blocks, caches, histories and matrices that it is traced from."""

    function: Function
    blocks: tuple[Block, ...]
    caches: tuple[CacheSpec, ...]
    histories: tuple[HistorySpec | MatrixSpec, ...]

    def changed_by(self, adapter: str) -> bool:
        """Whether an adapter changes one of its blocks."""
        return any(True for block in self.blocks for _ in block.adapter_weights(adapter))

    def including(self, adapter: str) -> "FunctionGraph":
        """The same graph with an adapter."""
        return replace(self, function=self.function.including(adapter))


class GraphMaker:
    """Makes graphs of blocks. Inputs are the tensors that they read; the caller names outputs."""

    def __init__(self, model: Model, memory: CachePlan, choose: Choosing = False) -> None:
        """With `choose`, a head gives only its largest logit."""
        self.model, self.memory, self.choose = model, memory, choose

    def make(
        self,
        segment: Segment,
        name: str,
        tokens: int,
        blocks: tuple[Block, ...],
        handed: Collection[str],
        wanted: Collection[str],
    ) -> FunctionGraph:
        """The graph of some blocks of a segment.

        The tensors in `handed` come from earlier calls, other inputs from the host. The outputs are
        those tensors in `wanted` that the blocks write.
        """
        inputs: dict[str, Input] = {}
        inside: set[str] = set()
        for block in blocks:
            for read in block.reads:
                if read not in inside and read not in inputs:
                    inputs[read] = self._input(read, tokens, handed)
            inside |= set(block.writes)
        outputs = [
            Output(name=f"{tensor}_out", shape=self._shape(tensor, tokens),
                   sink=ToTensor(name=tensor))
            for tensor in (*self.model.channels, *self.model.shared)
            if tensor in inside & set(wanted)
        ]  # fmt: skip
        keeping = any(block.keeps for block in blocks)
        caches = self.memory.caches(segment, tokens) if keeping else ()
        histories = self.memory.histories(segment) if keeping else ()
        for cache in caches:
            inputs |= {item.name: item for item in cache.form.inputs(cache, tokens)}
            outputs += cache.form.outputs(cache, tokens)
        for history in histories:
            inputs[history.name] = history.input()
            outputs.append(history.output(tokens))
        for number, head in enumerate(b for b in blocks if isinstance(b, Head)):
            outputs += self._head_outputs(head, number, tokens)
        function = Function(
            name=name,
            owner=segment.owner,
            tokens=tokens,
            inputs=tuple(inputs.values()),
            outputs=tuple(outputs),
            states=tuple(dict.fromkeys(s for cache in caches for s in cache.form.states(cache))),
        )
        return FunctionGraph(function, blocks, caches, histories)

    def _head_outputs(self, head: Head, number: int, tokens: int) -> list[Output]:
        """Logits, or the largest of them and its row."""
        start, stop = head.start, head.stop
        if not self.choose:
            shape = self.model.axes.shape(stop - start, tokens)
            sink = ToLogits(start=start, stop=stop)
            return [Output(name=f"logits_{number}", shape=shape, sink=sink)]
        logit = ToChoice(part="logit", start=start, stop=stop)
        best = Output(name=f"logit_{number}", shape=(1, tokens), sink=logit)
        row, name = ToChoice(part="row", start=start, stop=stop), f"row_{number}"
        if self.choose == "argmax":
            return [Output(name=name, shape=(1, tokens), dtype="int32", sink=row), best]
        row = row.model_copy(update={"block": choice_block(stop - start)})
        return [Output(name=name, shape=(2, tokens), sink=row), best]

    def _shape(self, tensor: str, tokens: int) -> Shape:
        if tensor in self.model.shared:
            name = self.model.shared[tensor]
            group = self.memory.groups[name]
            return (1, group.heads, group.dim, self.memory.visible(name, tokens))
        return self.model.axes.shape(self.model.channels[tensor], tokens)

    def _input(self, name: str, tokens: int, handed: Collection[str]) -> Input:
        """A tensor that a block reads: from an earlier call if one made it, else from the host."""
        if name in handed:
            return Input(name=name, shape=self._shape(name, tokens), source=FromTensor(name=name))
        source = self.model.host[name]
        shape: Shape
        if isinstance(source, TokenIds):
            return Input(name=name, shape=(1, tokens), dtype="int32", source=source)
        if isinstance(source, Embedding | PositionRows):
            shape = self._shape(name, tokens)
        elif isinstance(source, Rotary):
            shape = (1, 1, self.model.rotary[source.table].width, tokens)
        else:
            assert isinstance(source, Mask)
            shape = (1, 1, tokens, self.memory.visible(source.group, tokens))
        return Input(name=name, shape=shape, source=source)


class Graphs(GraphMaker):
    """Makes the graphs of a plan's functions."""

    def __init__(
        self,
        model: Model,
        choose: Choosing,
        arrangement: Arrangement,
        memory: CachePlan,
        calls: Calls,
    ) -> None:
        super().__init__(model, memory, choose)
        self.arrangement, self.calls = arrangement, calls

    def of_segment(self, segment: Segment, name: str, tokens: int) -> Iterator[FunctionGraph]:
        """The functions of a segment for a mode `name`: one, and `FILL` if silent calls need it. If
        the mode routes experts, one for the router and one for each part."""
        full, later = segment.function(name), self.arrangement.after(segment)
        block = self.calls.routed(segment, name)
        if block is None:
            yield self.graph(segment, full, tokens, segment.blocks, later)
            if self.calls.fills(segment, name):
                # A program must have an output, and must use all weights of its shard.
                yield self.graph(
                    segment,
                    segment.function(FILL),
                    tokens,
                    self.calls.silent(segment),
                    [b for b in later if b in self.calls.filling],
                    wanted={"hidden"},
                )
            return
        router, experts = self.calls.parts(block)
        before = (*segment.blocks[:-1], router)
        wanted = {block.scores, *(block.writes if block.adds else ())}
        yield self.graph(segment, full, tokens, before, [*experts, *later], wanted=wanted)
        for index, expert in enumerate(experts):
            own = segment.expert(index, name)
            yield self.graph(segment, own, tokens, (expert,), later, made=segment.blocks)

    def graph(
        self,
        segment: Segment,
        name: str,
        tokens: int,
        blocks: tuple[Block, ...],
        after: Sequence[Block],
        wanted: Collection[str] = (),
        made: Sequence[Block] = (),
    ) -> FunctionGraph:
        """The graph of some blocks of a segment.

        Inputs are the tensors that they read and do not make. Outputs are the tensors that the
        blocks `after` them read, and those in `wanted`. `made` are blocks of the segment that ran
        before.
        """
        handed = {w for block in (*self.arrangement.before(segment), *made) for w in block.writes}
        handed |= {w for b in made if isinstance(b, RoutedBlock) for w in b.router().writes}
        return self.make(segment, name, tokens, blocks, handed, needed(after) | set(wanted))
