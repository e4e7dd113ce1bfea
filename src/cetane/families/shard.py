"""The module that is traced: some blocks, in order, behind named inputs and outputs."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cetane.families.base import Block, CacheGroup
from cetane.families.caches import CONTRACTS, CacheSpec, ContractName
from cetane.families.flow import Input, Mask, Output, ToCache, ToLogits


class Shard(nn.Module):
    """One function of a shard: `forward(*inputs)` in the order of `inputs`, a tuple of outputs.

    States are buffers named as Core ML will name them.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        contract: ContractName,
        specs: Sequence[CacheSpec],
        groups: dict[str, CacheGroup],
        inputs: Sequence[Input],
        outputs: Sequence[Output],
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.order = tuple(blocks)
        self.cache, self.specs = CONTRACTS[contract], specs
        self.inputs, self.outputs = inputs, outputs
        self.repeats = {
            i.name: groups[i.source.group].query // groups[i.source.group].heads
            for i in inputs
            if isinstance(i.source, Mask)
        }
        for spec in specs:
            for state in self.cache.states(spec):
                self.register_buffer(state.name, torch.zeros(state.shape))

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        flow = {i.name: tensor for i, tensor in zip(self.inputs, tensors, strict=True)}
        flow |= dict(self.named_buffers(recurse=False))
        for name, repeats in self.repeats.items():
            # One mask row per query head of a key/value head, made once for all layers.
            flow[name] = torch.cat([flow[name]] * repeats, dim=2)
        caches = {spec.group: self.cache(spec, flow) for spec in self.specs}
        heads = []
        for block in self.order:
            block(flow, caches[block.group].extend if block.group else None)
            if "logits" in block.writes:
                heads.append(flow["logits"])
        for cache in caches.values():
            flow |= cache.results()
        logits = iter(heads)
        return tuple(
            next(logits) if isinstance(out.sink, ToLogits) else flow[source_name(out)]
            for out in self.outputs
        )


def source_name(out: Output) -> str:
    """Where the flow holds an output: cache results under its own name, tensors under theirs."""
    return out.name if isinstance(out.sink, ToCache) else out.sink.name  # type: ignore[union-attr]
