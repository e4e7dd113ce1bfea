"""The experts that tokens choose, in a port and in the model.

Where two experts are nearly as likely, rounding chooses between them, and either choice is right.
There the model takes the port's experts. So all that follows has the same limit as without experts.

Of a port, a program and an authored module show what they compare in order to choose. Of the model,
routers note what they choose, and follow.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from cetane.engine.backend import Array
from cetane.engine.call import columns
from cetane.families import Block, Projection, RoutedBlock, Shard
from cetane.gates.far_experts import (
    ROUTERS,
    BoundedScores,
    WatchedMixer,
    far_names,
    far_values,
)
from cetane.gates.limits import limits
from cetane.gates.transformers_model import own_tensors
from cetane.lower.tracing import LabelledWeight
from cetane.mil import MilFunction, Op
from cetane.mil.program import NamedValue
from cetane.planner import Planner
from cetane.schema.function import Route, Step
from cetane.schema.interface import Output, ToTensor


class Chosen(NamedTuple):
    """What the router of a layer chose for some tokens."""

    numbers: Array
    """The tokens, `(n,)`."""
    experts: Array
    """`(n, chosen)`, ascending; in the order of choice, if some are far."""
    far: Array | None = None
    """Which experts are far below each that a token takes, bool `(n, chosen, E)`, of a block that
    is `bounded`."""


Choices = Mapping[int, Chosen]
"""By layer."""
LEAST_TIE = 2e-6
"""Nats within which fp32 perhaps does not tell two experts apart: some steps of a probability. The
steps of larger numbers are larger."""
CHOOSING = ("reduce_max", "equal", "sub")
"""The kinds of ops that choose by what a router compares: its maximum, where that is, and the rest
without it. The last one also makes near experts of far ones. Other readers make weights of it."""
LOGITS_AT = {"AfmoeTokenChoiceRouter": 0, "HunYuanMoEV1Gate": 0, "Llama4Router": 1}
"""Which output of a router is its logits, where its name or the place is not the usual one."""
BY_SIGMOIDS = {
    "AfmoeTokenChoiceRouter", "DeepseekV3TopkRouter", "Dots1TopkRouter", "ExaoneMoeTopkRouter",
    "Glm4MoeLiteTopkRouter", "Glm4MoeTopkRouter", "HYV3TopKRouter", "Lfm2MoeTopKRouter",
    "MiniMaxM2TopKRouter", "SolarOpenTopkRouter",
}  # fmt: skip
"""The routers that compare the sigmoids of logits, perhaps with a correction."""
CORRECTED = {"Ernie4_5_MoeTopKRouter"}
"""The routers that compare the probabilities of experts with a correction."""
LEAST_SLOPE = 0.03
"""A sigmoid changes by this times a change of its logit, or by less. fp32 has 6e-8 between two
numbers below 1: that is `LEAST_TIE` times this slope. Where it is less steep, its own rounding
decides."""


def shown_name(block: Block) -> str:
    """The name under which a port shows what a layer's router compares."""
    return f"experts_of_{block.layer}"


def followed_name(shown: str) -> str:
    """The name of the copy by which a router chooses, by that of what a port shows."""
    return f"{shown}_followed"


def routed_blocks(layers: Sequence[Block]) -> dict[str, RoutedBlock]:
    """The blocks with experts, by the names of what they show."""
    return {shown_name(block): block for block in layers if isinstance(block, RoutedBlock)}


def far_blocks(layers: Sequence[Block]) -> dict[str, RoutedBlock]:
    """The blocks with far experts, by the names of what they show of these."""
    return {name: block for block in routed_blocks(layers).values() for name in far_names(block)}


def ranked(scores: Array, count: int) -> Array:
    """The `count` channels with the largest `scores (channels, n)` of each token, the best first.

    Of equal channels the first is taken, as in a port."""
    order: Array = np.argsort(-scores, axis=0, kind="stable")[:count].T
    return order


def best(scores: Array, count: int) -> Array:
    """The same channels, ascending."""
    chosen: Array = np.sort(ranked(scores, count), axis=1)
    return chosen


def showing(
    function: MilFunction, used: Mapping[str, LabelledWeight], follows: bool = False
) -> MilFunction:
    """The function with what its routers compare as outputs, and the experts that are far; `used`
    are its parameters by name.

    If it `follows`, its routers choose by copies of that, `followed_name`. A run may put other
    numbers in place of a copy: weights do not depend on it otherwise."""
    for block, value in routers(function, used):
        for shown, one in [(shown_name(block), value), *far_values(function, block, value)]:
            function = with_output(function, one, shown)
            if follows:
                function = choosing_by_copy(function, one, followed_name(shown))
    return function


def routers(
    function: MilFunction, used: Mapping[str, LabelledWeight]
) -> Iterator[tuple[RoutedBlock, NamedValue]]:
    """The layers of which a function has the router, each with what the router compares."""
    deciding: dict[RoutedBlock, set[str]] = defaultdict(set)
    for name, constant in used.items():
        block = constant.block
        if isinstance(block, RoutedBlock) and constant.path.startswith(f"{block.deciding}."):
            deciding[block].add(name)
    for block, names in deciding.items():
        router = block.get_submodule(block.deciding)
        assert isinstance(router, Projection)
        value = compared(function, names, router.outputs, f"{block.scores}_out")
        if value is not None:
            yield block, value


def compared(
    function: MilFunction, deciding: set[str], count: int, given: str
) -> NamedValue | None:
    """What a router compares: the first value of `count` channels behind its `deciding` parameters
    whose maximum is taken. Those of groups of experts have fewer channels.

    A function that leaves the choice to the host has the output `given` there. None for a function
    without the router."""
    values, reached = {}, {*deciding}
    for op in function.ops:
        values.update({value.name: value for value in op.outputs})
        if reached.isdisjoint(op.references()):
            continue
        if op.kind == "reduce_max":
            (read,) = op.inputs["x"]
            value = values.get(read) if isinstance(read, str) else None
            if value is None or value.type is None or value.type.shape[1:2] == (count,):
                return value
        reached.update(value.name for value in op.outputs)
    return values[given] if given in reached else None


def with_output(function: MilFunction, value: NamedValue, name: str) -> MilFunction:
    """The function with a value as one more output, `name`."""
    copy = copy_of(value, name)
    (named,) = copy.outputs
    assert named.type is not None
    ops, outputs = (*function.ops, copy), (*function.body.outputs, name)
    return replace(
        function,
        outputs={**function.outputs, name: named.type},
        body=replace(function.body, ops=ops, outputs=outputs),
    )


def choosing_by_copy(function: MilFunction, value: NamedValue, name: str) -> MilFunction:
    """The function in which ops that choose by a value read its copy `name` instead."""

    def other(op: Op) -> Op:
        if op.kind not in CHOOSING:
            return op
        inputs = {
            key: tuple(name if one == value.name else one for one in given)
            for key, given in op.inputs.items()
        }
        return replace(op, inputs=inputs)

    ops = list[Op]()
    for op in function.ops:
        ops += [other(op), copy_of(value, name)] if value in op.outputs else [other(op)]
    return replace(function, body=replace(function.body, ops=tuple(ops)))


def copy_of(value: NamedValue, name: str) -> Op:
    """The op that copies a value."""
    return Op("identity", name, {"x": (value.name,)}, (NamedValue(name, value.type),))


@dataclass
class TakenExperts:
    """The experts that tokens take in one run of a port, for a run of the same calls in another
    arithmetic. Near a tie either choice is right, but later tokens read what it gave."""

    blocks: Mapping[str, RoutedBlock]
    """The blocks with experts, by the names of what a port shows of them."""
    far: Mapping[str, RoutedBlock]
    """Those with far experts, by the names of what it shows of these."""
    calls: dict[tuple[str, str], deque[Array]] = field(default_factory=lambda: defaultdict(deque))
    """By shard and name of what it shows: of each call, experts by token, `(n, chosen)`, the best
    first: a Phi-MoE weighs the first one otherwise than the second. Of far experts, `(n, E)`."""

    @classmethod
    def of(cls, planner: Planner) -> "TakenExperts":
        layers = planner.model.layers
        return cls(routed_blocks(layers), far_blocks(layers))

    def note(self, step: Step | Route, name: str, value: Array, tokens: int) -> None:
        """Note what a call shows: an engine's `Watch`."""
        if name in self.blocks:
            experts = ranked(columns(value)[:, :tokens], self.blocks[name].chosen)
            self.calls[step.shard, name].append(experts)
        elif name in self.far:
            self.calls[step.shard, name].append(columns(value)[:, :tokens].T)

    def by_name(self, shard: str) -> Mapping[str, Callable[[Tensor], Tensor]]:
        """What the next call of a shard takes in place of its own choices, by the names of their
        copies."""
        ranks = {followed_name(name): partial(self.ranks, shard, name) for name in self.blocks}
        far = {followed_name(name): partial(self.far_ones, shard, name) for name in self.far}
        return ranks | far

    def far_ones(self, shard: str, name: str, like: Tensor) -> Tensor:
        """1 for the noted far experts of the next call, in the shape of `like`."""
        rows = torch.from_numpy(self.calls[shard, name].popleft())
        far = torch.zeros(like.shape[1], like.numel() // like.shape[1], dtype=like.dtype)
        far[:, : len(rows)] = rows.T.to(like.dtype)
        return far.reshape(like.shape)

    def ranks(self, shard: str, name: str, like: Tensor) -> Tensor:
        """What the next call compares in order to take the noted experts: their number for the
        best, one less for the next, 0 for all others. It has the shape of `like`, of E channels."""
        experts = torch.from_numpy(self.calls[shard, name].popleft())
        taken = torch.zeros(like.shape[1], like.numel() // like.shape[1], dtype=like.dtype)
        falling = torch.arange(experts.shape[1], 0, -1, dtype=like.dtype)
        taken[experts, torch.arange(len(experts))[:, None]] = falling
        return taken.reshape(like.shape)


def show(module: Shard) -> None:
    """Let an authored module give what its routers compare as outputs."""
    for block in module.blocks:
        root = block.root
        if isinstance(root, RoutedBlock) and (block is root or root.scores in block.writes):
            block.register_forward_hook(note_scores)
            for name in (shown_name(root), *far_names(root)):
                output = Output(name=name, shape=(1,), sink=ToTensor(name=name))
                module.outputs = (*module.outputs, output)


def note_scores(block: Block, given: tuple[Any, ...], _: None) -> None:
    """Keep what a block's router compared beside that of later blocks."""
    flow, root = given[0], block.root
    assert isinstance(root, RoutedBlock)
    flow.update(zip((shown_name(root), *far_names(root)), root.compared(flow), strict=True))


def is_router(module: nn.Module) -> bool:
    """Whether a module outputs the logits of experts: first, or at the place in `LOGITS_AT`."""
    name = type(module).__name__
    return (
        name.lower().endswith("topkrouter")
        or name in LOGITS_AT
        or "balancing_biases" in own_tensors(module)
    )


def layer_of(path: str) -> int | None:
    """The number of the layer that a module's path leads into; None for one outside of layers."""
    return next((int(part) for part in path.split(".") if part.isdigit()), None)


@dataclass
class Routing:
    """The model's choices on sequences side by side, by layer.

    A margin says how much likelier the last expert that a token takes is than the next one, in nats
    of the router's logits. It is that of the router's own choice, whatever the model followed.
    """

    shape: torch.Size
    """The sequences, and their tokens: `(B, T)`."""
    wanted: Sequence[Choices]
    """A port's choices, for each sequence. The model follows them where it is undecided."""
    margins: dict[int, Tensor] = field(default_factory=dict)
    """`(B, T)`."""
    experts: dict[int, Tensor] = field(default_factory=dict)
    """The router's own choice, `(B, T, chosen)`, ascending; in the order of choice, if some are
    far."""
    far: dict[int, Tensor] = field(default_factory=dict)
    """The far ones of each, bool `(B, T, chosen, E)`, of routers that have some."""

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        """A context: the model's routers note their choices here, and follow."""
        routers = {p: m for p, m in model.named_modules() if is_router(m)}
        for path, router in routers.items():
            bounded = type(router).__name__ in ROUTERS
            make = self._bounded_forward if bounded else self._forward
            router.forward = make(router, layer_of(path) or 0)
        try:
            yield
        finally:
            for router in routers.values():
                del router.forward

    def _forward(self, router: nn.Module, layer: int) -> Any:
        plain = router.forward

        def forward(*given: Any, **named: Any) -> Any:
            with WatchedTopk() as topk:
                output = plain(*given, **named)
            if topk.experts is None:  # it chooses otherwise
                return output
            own = topk.experts.reshape(*self.shape, -1).sort(-1).values
            scores = RouterScores.of(router, output, topk.ranked, self.shape)
            if own.shape[-1] == scores.compared.shape[-1]:  # every token takes all experts
                return output
            self.margins[layer], self.experts[layer] = scores.margin(own), own
            followed = self._followed(layer, own)
            near = scores.margin(followed) >= -scores.tie
            follows = near & (followed != own).any(-1)
            if not follows.any():
                return output
            with WatchedTopk(follows.reshape(-1, 1), followed.flatten(0, 1), topk.calls):
                return plain(*given, **named)

        return forward

    def _bounded_forward(self, router: nn.Module, layer: int) -> Any:
        """As `_forward`, of a router with far experts."""
        plain = router.forward

        def forward(*given: Any, **named: Any) -> Any:
            with WatchedMixer() as mixer:
                output = plain(*given, **named)
            own = torch.cat(mixer.taken, -1).reshape(*self.shape, -1)
            own_far = torch.stack(mixer.far, -2).reshape(*own.shape, -1)
            scores = BoundedScores.of(router, output[0], self.shape)
            self.margins[layer] = scores.margin(own, own_far)
            self.experts[layer], self.far[layer] = own, own_far
            followed, far = self._followed(layer, own), self._followed(layer, own_far, "far")
            other = (followed != own).any(-1) | (far != own_far).any(-1).any(-1)
            tie = tie_of(scores.logits, scores.logits)
            follows = other & (scores.margin(followed, far) >= -tie)
            if not follows.any():
                return output
            flat = followed.flatten(0, 1), far.flatten(0, 1)
            with WatchedMixer(follows.reshape(-1, 1), *flat):
                return plain(*given, **named)

        return forward

    def _followed(
        self, layer: int, own: Tensor, part: Literal["experts", "far"] = "experts"
    ) -> Tensor:
        """A part of the port's choices `(B, T, ...)`, and the router's `own` ones of other
        tokens."""
        followed = own.clone()
        for row, choices in enumerate(self.wanted):
            if layer in choices and (theirs := getattr(choices[layer], part)) is not None:
                followed[row, torch.from_numpy(choices[layer].numbers)] = torch.from_numpy(theirs)
        return followed


@dataclass(frozen=True)
class RouterScores:
    """What a router makes of some tokens, `(B, T, E)`."""

    slopes: Tensor
    """What the numbers that are compared change with their logits: for probabilities, at most
    themselves."""
    compared: Tensor
    """The numbers whose largest are chosen: probabilities or sigmoids, corrected if the
    router does that."""
    tie: Tensor
    """Nats within which rounding may choose either of two experts, `(B, T)`. Logits below 1 err by
    less. So a router that weighs experts nearly alike does not excuse every choice."""
    groups: int = 1
    open_groups: int = 1
    """Groups of experts, and those from which a token takes some (`Mixture`)."""

    @classmethod
    def of(
        cls, router: nn.Module, output: Any, ranked: Tensor, shape: torch.Size
    ) -> "RouterScores":
        """The scores behind a router's output; `ranked` is what it first gave to `topk`."""
        name = type(router).__name__
        logits = output[LOGITS_AT.get(name, 0)].float().reshape(*shape, -1)
        groups = 1, 1
        if name in BY_SIGMOIDS:
            weights, compared = torch.sigmoid(logits), ranked.reshape(logits.shape)
            slopes = (weights * (1 - weights)).clamp(min=LEAST_SLOPE)
            groups = getattr(router, "num_group", 1), getattr(router, "topk_group", 1)
        else:
            slopes = torch.softmax(logits, -1)
            compared = slopes + getattr(router, "balancing_biases", 0)
            if name in CORRECTED:
                compared = ranked.reshape(logits.shape)
        return cls(slopes, compared, tie_of(logits, compared), *groups)

    def margin(self, experts: Tensor) -> Tensor:
        """How much likelier the last of some `experts (B, T, chosen)` is than the best other one,
        in nats of the logits `(B, T)`. It is negative if the other one is likelier.

        Of a router that first chooses groups, it is that of the groups if theirs is smaller."""
        taken = torch.zeros_like(self.compared, dtype=torch.bool).scatter(-1, experts, True)
        if self.open_groups == self.groups:
            return gap(self.compared, self.slopes, taken)
        by_group = self.compared.unflatten(-1, (self.groups, -1))
        best = by_group.topk(2, -1)
        sums = best.values.sum(-1)
        slopes = self.slopes.unflatten(-1, (self.groups, -1)).gather(-1, best.indices).sum(-1)
        # The groups of these experts, and the best others up to the number of open ones.
        needed = taken.unflatten(-1, (self.groups, -1)).any(-1)
        opened = sums.masked_fill(needed, torch.inf).topk(self.open_groups, -1).indices
        opened = torch.zeros_like(needed).scatter(-1, opened, True)
        inside = by_group.masked_fill(~opened[..., None], -torch.inf).flatten(-2)
        return torch.minimum(gap(sums, slopes, opened), gap(inside, self.slopes, taken))


def tie_of(logits: Tensor, compared: Tensor) -> Tensor:
    """Nats within which rounding may choose otherwise, `(B, T)`, where a router compares numbers
    that it makes of logits, both `(B, T, E)`."""
    largest = logits.abs().amax(-1).clamp(max=1)
    steps = compared.abs().amax(-1).clamp(min=1)  # fp32's grow with what it holds
    return torch.maximum(limits().structure.tie * largest, LEAST_TIE * steps)


def gap(compared: Tensor, slopes: Tensor, taken: Tensor) -> Tensor:
    """How far the last of what is `taken` lies above the best of the rest, `(B, T)`, in nats. All
    are `(B, T, n)`."""
    last = compared.masked_fill(~taken, torch.inf).min(-1)
    next_ = compared.masked_fill(taken, -torch.inf).max(-1)
    both = torch.stack([last.indices, next_.indices], -1)
    return (last.values - next_.values) / slopes.gather(-1, both).amax(-1)


class WatchedTopk(TorchFunctionMode):
    """A context that notes the experts which a router chooses, or changes those of some tokens. The
    routers of all families choose by `topk`; some choose groups of experts before."""

    def __init__(
        self, follows: Tensor | None = None, followed: Tensor | None = None, last: int = 0
    ) -> None:
        """`follows (n, 1)` says for which tokens to take the experts `followed (n, chosen)`. `last`
        is the number of the call that chooses experts, from 1."""
        super().__init__()
        self.follows, self.followed, self.last = follows, followed, last
        self.experts: Tensor | None = None
        """What the router itself chose, `(..., chosen)`."""
        self.calls = 0
        """The number of its choices so far."""
        self.ranked = torch.empty(0)
        """What it chose by, before it closed any group, `(..., E)`."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        self.calls += 1
        if self.calls == 1:
            self.ranked = args[0]
        self.experts = own = result.indices
        if self.follows is None or self.followed is None or self.calls != self.last:
            return result
        chosen = torch.where(self.follows, self.followed, own.reshape(self.followed.shape))
        chosen = chosen.reshape(own.shape)
        return type(result)((args[0].gather(-1, chosen), chosen))
