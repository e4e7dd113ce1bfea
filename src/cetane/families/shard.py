"""The module that is traced: blocks in order, with named inputs and outputs."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cetane.families.adapters import adapter_on
from cetane.families.base import Block, Memory
from cetane.families.caches import CacheSpec
from cetane.families.choice import argmax, choose
from cetane.families.model import CacheGroup, Head, Model
from cetane.families.pasts import HistorySpec, MatrixSpec
from cetane.schema.interface import Input, Mask, Output, ToChoice, ToLogits, ToTensor


class Shard(nn.Module):
    """One function of a shard: `forward(*inputs)` in the order of `inputs`, a tuple of outputs.

    States are buffers with the names that Core ML will give them. Blocks are not submodules, since
    several functions share them.
    """

    def __init__(
        self,
        model: Model,
        blocks: Sequence[Block],
        caches: Sequence[CacheSpec],
        histories: Sequence[HistorySpec | MatrixSpec],
        inputs: Sequence[Input],
        outputs: Sequence[Output],
        adapter: str | None = None,
    ) -> None:
        super().__init__()
        self.blocks, self.inputs, self.outputs = tuple(blocks), inputs, outputs
        self.adapter = adapter
        self.caches, self.histories = caches, histories
        self.axes, self.softcap = model.axes, model.softcap
        self.repeats = {i.name: rows_per_token(model, i) for i in inputs}
        for spec in caches:
            for state in spec.form.states(spec):
                self.register_buffer(state.name, torch.zeros(state.shape))

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        flow = {i.name: tensor for i, tensor in zip(self.inputs, tensors, strict=True)}
        flow |= dict(self.named_buffers(recurse=False))
        for name, repeats in self.repeats.items():
            if repeats > 1:  # made once for all layers
                flow[name] = torch.cat([flow[name]] * repeats, dim=2)
        caches = {spec.group: spec.form(spec, flow) for spec in self.caches}
        histories = {spec.name: spec.keeper(flow) for spec in self.histories}
        keepers = caches | histories
        memory: Memory = {name: keeper.extend for name, keeper in keepers.items()}
        heads: dict[int, Tensor] = {}
        with adapter_on(self.blocks, self.adapter):
            for block in self.blocks:
                block(flow, memory)
                if isinstance(block, Head):
                    heads[block.start] = flow["logits"]
        results = {name: value for k in keepers.values() for name, value in k.results().items()}

        choices: dict[int, tuple[Tensor, Tensor]] = {}

        def result(output: Output) -> Tensor:
            match output.sink:
                case ToLogits(start=start):
                    return heads[start]
                case ToChoice(part="row", start=start, block=1):
                    choices[start] = argmax(heads[start], self.axes.time, self.softcap)
                    return choices[start][0]
                case ToChoice(part="row", start=start, block=block):  # its logit comes next
                    choices[start] = choose(heads[start].flatten(2), block)
                    return choices[start][0]
                case ToChoice(start=start):
                    return choices[start][1]
                case ToTensor(name=name):
                    return flow[name]
            return results[output.name]

        return tuple(result(output) for output in self.outputs)


def rows_per_token(model: Model, item: Input) -> int:
    """The rows of a mask for each token: the number of query heads of a key/value head."""
    if not isinstance(item.source, Mask):
        return 1
    group = model.memory[item.source.group]
    assert isinstance(group, CacheGroup)
    return group.query // group.heads
