"""Mixtures of experts: each token goes to the best few, and their outputs are added.

transformers keeps the experts of a layer as one tensor for each matrix, `(E, rows, columns)`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from pydantic import Field
from torch import Tensor, nn, sigmoid, softmax

from cetane.errors import CetaneError
from cetane.families.axes import Axes
from cetane.families.base import Flow, Memory, Part, RoutedBlock, Truth, Weight
from cetane.families.blocks import NAMES, PartNames
from cetane.families.layers import (
    MLP,
    Held,
    Leaf,
    Pick,
    Projection,
    RMSNorm,
    activation,
    first_largest,
)
from cetane.families.options import ResidualOptions

WEIGHTS = "weights"
"""The tensor of a layer's router: the weight of each expert in each token, `(1, E, 1, T)`."""
FAR = 2.0**15
"""More than logits of a router lie apart, and within fp16's range below any of them."""
NORMED = "normed"
"""The tensor that a layer's experts read."""


class ExpertOptions(ResidualOptions):
    """The `[family]` table of a mixture of experts."""

    together: int = Field(default=1, ge=1, le=4096)
    """The number of experts in one set of matrices, and with `layout.routed` in one function. A
    device holds only some hundred functions."""


class PartlyDense(Protocol):
    """The keys by which a Qwen says which layers have no experts."""

    num_experts: int
    mlp_only_layers: list[int]
    decoder_sparse_step: int


def is_dense(config: PartlyDense, index: int) -> bool:
    """Whether a layer has one MLP for all tokens."""
    listed = index in config.mlp_only_layers or (index + 1) % config.decoder_sparse_step != 0
    return listed or config.num_experts == 0


@dataclass(frozen=True)
class Mixture:
    """The sizes of a layer's experts, and the way in which a token takes some."""

    hidden: int
    inner: int
    count: int
    chosen: int
    """Experts of a token."""
    normalised: bool
    """Whether the weights of a token's experts are divided by their sum."""
    act: str
    together: int
    factor: float = 1.0
    """The factor on outputs."""
    sigmoid: bool = False
    """Whether an expert's weight is the sigmoid of its own logit, not a share of all."""
    added: float = 0.0
    """What is added to the sum by which weights are divided."""

    def __post_init__(self) -> None:
        if not (self.chosen and self.count and 1 <= self.chosen <= self.count):
            raise CetaneError(
                f"config.json is not valid: a token takes {self.chosen} experts of {self.count}"
            )

    def bounds(self) -> list[tuple[int, int]]:
        """The first expert of each group, and the one after its last. A group is the `together`
        experts of one set of matrices."""
        starts = range(0, self.count, self.together)
        return [(start, min(start + self.together, self.count)) for start in starts]

    def weigh(
        self, logits: Tensor, axes: Axes, balanced: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """The weights of all experts for each token, zero for those that it does not take.

        Logits and weights are hidden tensors of E channels, `(1, E, 1, T)`. The largest logit is
        taken `chosen` times: a sort or indices might leave the ANE. Of equal ones, the first is
        taken. `balanced` makes of weights what is compared in place of logits.
        """
        # A share of all would underflow beside a large one, where a sigmoid does not.
        scores = sigmoid(logits) if self.sigmoid else softmax(logits, dim=1)
        left = logits if self.sigmoid else scores
        if balanced is not None:
            left = balanced(scores)
        away = 2.0 if left is scores else FAR  # below all others: shares are at most 1
        best = taken = first_largest(left, self.count, axes)
        for _ in range(1, self.chosen):
            left = left - away * best
            best = first_largest(left, self.count, axes)
            taken = taken + best
        weights = scores * taken
        if not self.normalised:
            return weights
        total = weights.sum(1, keepdim=True)
        return weights / (total + self.added if self.added else total)


class ExpertConfig(Protocol):
    """The keys of the config of every mixture of experts."""

    hidden_size: int
    hidden_act: str
    num_experts_per_tok: int


def mixture_of(
    config: ExpertConfig,
    options: ExpertOptions,
    count: int,
    inner: int,
    normalised: bool,
    factor: float = 1.0,
    **more: Any,
) -> Mixture:
    """The mixture of a config: `count` experts of `inner` channels. `factor` is that on outputs
    beside the residual stream's; `more` are other fields of `Mixture`."""
    return Mixture(
        hidden=config.hidden_size,
        inner=inner,
        count=count,
        chosen=config.num_experts_per_tok,
        normalised=normalised,
        act=config.hidden_act,
        together=options.together,
        factor=options.scale * factor,
        **more,
    )


@dataclass(frozen=True)
class StackedRows:
    """A parameter's place in a checkpoint: a tensor of a row for each expert."""

    name: str
    row: tuple[int, ...]
    """The shape of an expert's row."""
    pick: Pick
    """It gets the rows of the parameter's experts."""


class MixtureExperts(nn.Module):
    """Some experts as one gated MLP: their inner channels lie side by side."""

    def __init__(self, mixture: Mixture, start: int, stop: int, bias: bool = False) -> None:
        """`bias` says whether gates and ups have biases."""
        super().__init__()
        self.start, self.stop = start, stop
        inner = (stop - start) * mixture.inner
        self.gate_proj = Projection(mixture.hidden, inner, "experts", bias)
        self.up_proj = Projection(mixture.hidden, inner, "experts", bias)
        self.down_proj = Projection(inner, mixture.hidden, "experts", factor=mixture.factor)
        self.act = activation(mixture.act)
        self.stored = stored_rows(mixture)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """What these experts add to the residual stream, a hidden tensor like `x (1, H, 1, T)`.

        `weights (1, E, 1, T)` are those of all experts of the layer.
        """
        inner = self.act(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(self.weighted(inner, weights))

    def weighted(self, inner: Tensor, weights: Tensor) -> Tensor:
        """Inner channels `(1, experts * I, 1, T)`, each times the weight of its expert."""
        mine = weights[:, self.start : self.stop]
        count = self.stop - self.start
        if count == 1:
            return inner * mine
        width = inner.shape[1] // count
        rows = inner.reshape(1, count, width, -1) * mine.reshape(1, count, 1, -1)
        return rows.reshape(inner.shape)


def stored_rows(mixture: Mixture) -> dict[str, StackedRows]:
    """The places of an MLP's weights. One tensor `(E, 2I, H)` has each expert's gate rows and then
    its up rows; the other `(E, H, I)` has its output rows."""
    hidden, inner = mixture.hidden, mixture.inner
    gate_up = (2 * inner, hidden)
    return {
        "gate_proj.weight": StackedRows("gate_up_proj", gate_up, partial(rows_of, 0, inner)),
        "up_proj.weight": StackedRows("gate_up_proj", gate_up, partial(rows_of, inner, 2 * inner)),
        "down_proj.weight": StackedRows("down_proj", (hidden, inner), side_by_side),
    }


def rows_of(start: int, stop: int, stored: Tensor) -> Tensor:
    """The rows `start .. stop` of each expert: `(experts, rows, columns)` ->
    `(experts * (stop - start), columns)`."""
    return stored[:, start:stop].flatten(0, 1)


def side_by_side(stored: Tensor) -> Tensor:
    """The columns of all experts: `(experts, rows, columns)` -> `(rows, experts * columns)`."""
    return stored.transpose(0, 1).flatten(1)


def columns_of(stored: Tensor) -> Tensor:
    """The rows of all experts as columns: `(experts, I, H)` -> `(H, experts * I)`."""
    return stored.flatten(0, 1).T


class SharedExpert(nn.Module):
    """An MLP for all tokens beside the experts, with a gate of its own if it is `gated`."""

    def __init__(
        self,
        hidden: int,
        inner: int,
        act: str,
        factor: float,
        bias: bool = False,
        gated: bool = False,
    ) -> None:
        super().__init__()
        self.expert = MLP(hidden, inner, act, bias, factor)
        self.gate = Projection(hidden, 1, None) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.expert(x)
        return made if self.gate is None else made * sigmoid(self.gate(x))


class ExpertBiases(Leaf):
    """What is added to the weights of experts where they are compared, so that all get tokens."""

    bias: Tensor

    def __init__(self, count: int) -> None:
        super().__init__()
        self.hold_channels("bias", count)

    def forward(self, weights: Tensor) -> Tensor:
        return weights + self.bias


class MixtureBlock(RoutedBlock):
    """A layer's router and experts, behind a norm. The residual stream may be scaled."""

    reads = ("hidden",)
    adds = True
    scores = WEIGHTS
    deciding = "router_proj"

    def __init__(
        self,
        mixture: Mixture,
        index: int,
        norm: RMSNorm,
        router: str = "gate",
        bias: bool = False,
        group: Callable[[Mixture, int, int], MixtureExperts] = MixtureExperts,
        shared: SharedExpert | None = None,
        shared_name: str = "shared_expert",
        names: PartNames = NAMES,
        biases: str | None = None,
    ) -> None:
        """`router`, `shared_name` and `biases` are the checkpoint's names, in `names.mlp`; `bias`
        is the router's. `biases` are those of experts, None for experts without."""
        super().__init__(f"moe-{index:02}", index, f"model.layers.{index}.")
        self.mixture, self.chosen, self.together = mixture, mixture.chosen, mixture.together
        self.axes, self.router_name, self.names = Axes(), router, names
        self.shared, self.shared_name = shared, shared_name
        self.add_module(names.mlp_norm, norm)
        self.router_proj = Projection(mixture.hidden, mixture.count, None, bias)
        self.biases_name = biases
        self.biases = None if biases is None else ExpertBiases(mixture.count)
        self.groups = nn.ModuleList(group(mixture, *bounds) for bounds in mixture.bounds())

    def weight(self, path: str, shape: tuple[int, ...], held: Held) -> Weight:
        home = self.names.mlp
        place, _, rest = path.partition(".")
        if place == "router_proj":
            return super().weight(f"{home}.{self.router_name}.{rest}", shape, held)
        if place == "biases":
            return super().weight(f"{home}.{self.biases_name}", shape, held)
        if place == "shared":
            name = rest.replace("expert.", f"{self.shared_name}.").replace(
                "gate.", f"{self.shared_name}_gate."
            )
            return super().weight(f"{home}.{name}", shape, held)
        if place != "groups":
            return super().weight(path, shape, held)
        number, _, name = rest.partition(".")
        group = self.groups[int(number)]
        assert isinstance(group, MixtureExperts)
        stored = group.stored[name]
        return Weight(
            f"{self.prefix}{home}.experts.{stored.name}",
            shape,
            (self.mixture.count, *stored.row),
            held.kind,
            (group.start, group.stop),
            stored.pick,
            held.factor,
            part=name.removesuffix(".weight"),
        )

    def forward(self, flow: Flow, memory: Memory) -> None:
        self.route(flow)
        for number in range(len(self.groups)):
            flow["hidden"] = flow["hidden"] + self.share(number, flow)

    def route(self, flow: Flow) -> None:
        flow[NORMED] = self.get_submodule(self.names.mlp_norm)(flow["hidden"])
        logits = self.router_proj(flow[NORMED])
        flow[WEIGHTS] = self.mixture.weigh(logits, self.axes, self.biases)
        if self.shared is not None:
            flow["hidden"] = flow["hidden"] + self.shared(flow[NORMED])

    def share(self, number: int, flow: Flow) -> Tensor:
        """What a group of experts adds."""
        shared: Tensor = self.groups[number](flow[NORMED], flow[WEIGHTS])
        return shared

    def run_group(self, number: int, flow: Flow) -> None:
        flow["hidden"] = self.share(number, flow)

    def router(self) -> Part:
        return MixtureRouter(
            name=f"{self.name}-router",
            whole=self,
            modules=(self.names.mlp_norm, "router_proj", "biases", "shared"),
            reads=("hidden",),
            writes=(NORMED, WEIGHTS, *(("hidden",) if self.shared is not None else ())),
            run=self.route,
        )

    def experts(self) -> tuple[Part, ...]:
        return tuple(
            Part(
                name=f"{self.name}-expert-{number:02}",
                whole=self,
                modules=(f"groups.{number}",),
                reads=(NORMED, WEIGHTS),
                writes=("hidden",),
                run=partial(self.run_group, number),
            )
            for number in range(len(self.groups))
        )


class MixtureRouter(Part):
    """The router of a layer. No module of transformers gives its tensors."""

    def truths(self) -> dict[str, Truth]:
        return {}


def expert_channels(mixture: Mixture | None) -> dict[str, int]:
    """The channels of the tensors between routers and experts; none without experts."""
    return {} if mixture is None else {NORMED: mixture.hidden, WEIGHTS: mixture.count}
