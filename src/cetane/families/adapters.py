"""Adapters in ANE form: what a LoRA adds to the projections of a model that keeps its weights.

A projection with an adapter computes `factor * (W x + up (down x)) + bias`. `up` holds the
adapter's scale. Only DoRA has a `factor`, and only an adapter that trained biases has a `bias`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from cetane.checkpoint.adapted import AdapterTensor, parts_of
from cetane.checkpoint.lora import Lora
from cetane.families.layers import Projection

if TYPE_CHECKING:
    from cetane.families.base import Block, Weight


class ProjectionAdapter(nn.Module):
    """The parameters that an adapter adds to one projection."""

    down: Tensor | None
    """`(r, I, 1, 1)`."""
    up: Tensor | None
    """`(O, r, 1, 1)`."""
    factor: Tensor | None
    """`(1, O, 1, 1)`."""
    bias: Tensor | None
    """`(O,)`."""

    def __init__(self, weights: Mapping[str, Weight]) -> None:
        super().__init__()
        self.weights = weights
        """The parameters' places in a checkpoint, by their names."""
        for name in ("down", "up", "factor", "bias"):
            weight = weights.get(name)
            empty = None if weight is None else torch.empty(weight.shape)
            held = None if empty is None else nn.Parameter(empty, requires_grad=False)
            self.register_parameter(name, held)

    def add(self, product: Tensor, x: Tensor) -> Tensor:
        """The projection's product, plus the adapter's."""
        if self.down is None or self.up is None:
            return product
        return product + nn.functional.conv2d(nn.functional.conv2d(x, self.down), self.up)


def adapt(blocks: Iterable[Block], name: str, lora: Lora) -> None:
    """Give the projections of some blocks the parameters of an adapter, without values.

    Only the maker of blocks may call this, before plans share them.
    """
    for block in blocks:
        own = dict(block.weights())
        for path, module in list(block.named_modules()):
            if isinstance(module, Projection):
                weights = dict(parameters(own, path, module, name, lora))
                if weights:
                    with torch.device("meta"):
                        module.adapt(name, ProjectionAdapter(weights))


def parameters(
    own: Mapping[str, Weight], path: str, module: Projection, adapter: str, lora: Lora
) -> Iterator[tuple[str, Weight]]:
    """The parameters that an adapter adds to a projection; `own` are the block's, by path."""
    leaf = "first" if module.at else "weight"
    base = own[f"{path}.{leaf}"]
    parts = parts_of(lora, base.name) if len(base.stored) == 2 else ()  # not a stack of matrices
    if parts:
        (outputs, inputs), rank = base.stored, lora.changes[base.name].rank
        made = module.outputs
        plain = replace(base, kind=None, columns=None)
        weights = {
            "down": replace(plain, shape=(rank, inputs, 1, 1), stored=(rank, inputs), rows=None,
                            pick=None, factor=1.0),
            "up": replace(plain, shape=(made, rank, 1, 1), stored=(outputs, rank)),
            "factor": replace(plain, shape=(1, made, 1, 1), stored=(outputs,), factor=1.0),
        }  # fmt: skip
        for part in parts:
            yield part, replace(weights[part], name=str(AdapterTensor(adapter, base.name, part)))
    bias = own.get(f"{path}.bias")
    if bias is not None and parts_of(lora, bias.name):
        yield "bias", replace(bias, name=str(AdapterTensor(adapter, bias.name, "bias")))


@contextmanager
def adapter_on(blocks: Iterable[Block], name: str | None) -> Iterator[None]:
    """A context in which the projections of some blocks include an adapter."""
    modules = [module for block in blocks for module in block.root.modules()]
    projections = [module for module in modules if isinstance(module, Projection)]
    changed = [p for p in projections if name is not None and name in p.adapters]
    for module in changed:
        module.active = name
    try:
        yield
    finally:
        for module in changed:
            module.active = None
