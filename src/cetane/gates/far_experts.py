"""Experts that are far below the taken one, in a port and in the model.

A router of SparseMixer-v2 (`RoutedBlock.bounded`) weighs an expert by its share among those that
are near it. Where another one lies at the bound, rounding decides whether it is near, and the
weight jumps. Neither weight is wrong, as with a tie of experts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from cetane.families import RoutedBlock
from cetane.mil import MilFunction
from cetane.mil.program import NamedValue

ROUTERS = {"PhimoeTopKRouter"}
"""The routers of transformers that have far experts."""


def far_names(block: RoutedBlock) -> list[str]:
    """The names under which a port shows far experts, one for each expert that a token takes."""
    taken = range(block.chosen if block.bounded else 0)
    return [f"far_experts_of_{block.layer}_{number}" for number in taken]


def far_values(
    function: MilFunction, block: RoutedBlock, logits: NamedValue
) -> Iterator[tuple[str, NamedValue]]:
    """The values of a router that are 1 for far experts, by their names: a program selects them by
    what it compares behind the `logits`, before later routers do. None, if it compares too few."""
    reached, found, conditions = {logits.name}, list[NamedValue](), set[str]()
    shape = logits.type and logits.type.shape
    for op in function.ops:
        read = reached.intersection(op.references())
        if not read:
            continue
        reached.update(value.name for value in op.outputs)
        (value, *_) = op.outputs
        if op.kind == "greater" and value.type is not None and value.type.shape == shape:
            conditions.add(value.name)
        elif op.kind == "select" and read & conditions:
            found.append(value)
    names = far_names(block)
    if len(names) <= len(found):
        yield from zip(names, found, strict=False)


class WatchedMixer(TorchFunctionMode):
    """A context that notes what a router of `ROUTERS` chooses, or changes that of some tokens. It
    takes an expert by `max`, and finds the far ones by `>`; then it takes the second one so."""

    def __init__(
        self,
        follows: Tensor | None = None,
        experts: Tensor | None = None,
        far: Tensor | None = None,
    ) -> None:
        """`follows (n, 1)` says for which tokens to take the `experts (n, chosen)`, in their order,
        and the `far` ones `(n, chosen, E)`."""
        super().__init__()
        self.follows, self.wanted, self.wanted_far = follows, experts, far
        self.taken: list[Tensor] = []
        """Each expert that the router itself took, `(n, 1)`."""
        self.far: list[Tensor] = []
        """The far ones of each, `(n, E)`."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is Tensor.max and hasattr(result, "indices"):
            self.taken.append(result.indices)
            if self.follows is not None and self.wanted is not None:
                number = len(self.taken) - 1
                own = result.indices
                indices = torch.where(self.follows, self.wanted[:, number, None], own)
                return type(result)((args[0].gather(-1, indices), indices))
        elif func in (Tensor.gt, Tensor.__gt__):
            self.far.append(result)
            if self.follows is not None and self.wanted_far is not None:
                return torch.where(self.follows, self.wanted_far[:, len(self.far) - 1], result)
        return result


@dataclass(frozen=True)
class BoundedScores:
    """What a router of `ROUTERS` compares for some tokens."""

    logits: Tensor
    """`(B, T, E)`."""
    bound: float
    """How far below the taken one an expert is near, as a part of the larger of both logits."""

    @classmethod
    def of(cls, router: nn.Module, logits: Tensor, shape: torch.Size) -> "BoundedScores":
        return cls(logits.float().reshape(*shape, -1), 2 * float(router.router_jitter_noise))  # type: ignore[arg-type]

    def margin(self, experts: Tensor, far: Tensor) -> Tensor:
        """By how many nats of the logits the closest of some choices is right, `(B, T)`: negative
        for a wrong one. `experts (B, T, chosen)` are in their order, `far (B, T, chosen, E)`."""
        open_to = torch.ones_like(self.logits, dtype=torch.bool)
        least = []
        for number, expert in enumerate(experts.unbind(-1)):
            most = self.logits.gather(-1, expert[..., None])
            open_to = open_to.scatter(-1, expert[..., None], False)
            least.append(most[..., 0] - self.logits.masked_fill(~open_to, -torch.inf).amax(-1))
            beyond = most - self.logits - self.bound * torch.maximum(self.logits.abs(), most)
            right = torch.where(far[..., number, :], beyond, -beyond)
            least.append(right.masked_fill(~open_to, torch.inf).amin(-1))
        return torch.stack(least).amin(0)
