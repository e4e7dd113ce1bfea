"""Mixtures of experts: each token goes to the best few, and their outputs are added.

transformers keeps the experts of a layer as one tensor for each matrix, `(E, rows, columns)`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol

from pydantic import Field
from torch import Tensor, nn, sigmoid, softmax

from cetane.errors import CetaneError
from cetane.families.axes import Axes
from cetane.families.base import Block, Flow, Memory, Part, RoutedBlock, Truth, Weight
from cetane.families.blocks import NAMES, PartNames
from cetane.families.configs import check_entries
from cetane.families.layers import (
    GATED,
    MLP,
    Held,
    Leaf,
    Norm,
    Pick,
    Projection,
    RMSNorm,
    activation,
    first_largest,
    first_ones,
    ones_where,
)
from cetane.families.options import ResidualOptions

WEIGHTS = "weights"
"""The tensor of a layer's router: the weight of each expert in each token, `(1, E, 1, T)`."""
FAR = 2.0**15
"""More than what chooses experts lies apart, and within fp16's range below any of it."""
NORMED = "normed"
"""The tensor that a layer's experts read."""
SUM = "sum"
"""The tensor to which a layer's experts add, if a norm follows."""


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


class ListedDense(Protocol):
    """The keys by which others say it."""

    model_type: str
    num_hidden_layers: int
    mlp_layer_types: list[str]


def listed_dense(config: ListedDense) -> list[bool]:
    """Whether every layer has one MLP for all tokens. CetaneError if the config lists too few."""
    types, count = config.mlp_layer_types, config.num_hidden_layers
    check_entries(config.model_type, "mlp_layer_types", types, count)
    return [name != "sparse" for name in types[:count]]


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
    gated: bool = True
    """Whether an expert's activation is that of a gate, which multiplies its ups."""
    sigmoid: bool = False
    """Whether an expert's weight is the sigmoid of its own logit, not a share of all."""
    groups: int = 1
    """The groups, of equally many experts, that experts next to each other make."""
    open_groups: int = 1
    """The groups from which a token takes its experts: those whose two best sum to the most."""
    added: float = 0.0
    """What is added to the sum by which weights are divided."""
    inverse: float = 1.0
    """What router and experts read is so many times the model's own."""
    bounded: ClassVar[bool] = False
    """As in `RoutedBlock`."""

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

    def weigh(self, logits: Tensor, axes: Axes, correction: "Correction | None" = None) -> Tensor:
        """The weights of all experts for each token, zero for those that it does not take.

        Logits and weights are hidden tensors of E channels, `(1, E, 1, T)`. Of equal experts, the
        first is taken. A `correction` counts only for the choice.
        """
        scores = sigmoid(logits) if self.sigmoid else softmax(logits, dim=1)
        # Logits choose as their sigmoids do, and fp16 tells large ones apart.
        compared = logits if self.sigmoid else scores
        if correction is not None:
            compared = correction(scores)
        if self.open_groups < self.groups:
            compared = self.with_closed(compared, axes)
        weights = scores * largest(compared, self.chosen, self.count, axes)
        if not self.normalised:
            return weights
        total = weights.sum(1, keepdim=True)
        return weights / (total + self.added if self.added else total)

    def far(self, logits: Tensor, axes: Axes) -> tuple[Tensor, ...]:
        """1 for the far experts of each expert that a token takes, if they are `bounded`."""
        return ()

    def with_closed(self, compared: Tensor, axes: Axes) -> Tensor:
        """What chooses experts, `(1, E, 1, T)`, far below all others in closed groups."""
        size = self.count // self.groups
        rows = compared.reshape(1, self.groups, size, -1)
        best = rows.amax(2, keepdim=True)
        others = rows - FAR * first_ones(ones_where(rows == best, rows), size)
        sums = (best + others.amax(2, keepdim=True)).reshape(axes.shape(self.groups, -1))
        opened = largest(sums, self.open_groups, self.groups, axes)
        closed = 1 - opened.reshape(1, self.groups, 1, -1)
        return (rows - FAR * closed).reshape(axes.shape(self.count, -1))


def largest(scores: Tensor, number: int, classes: int, axes: Axes) -> Tensor:
    """1 in the `number` largest of `classes` channels of each token, 0 in the others.

    The largest one is taken `number` times: a sort or indices might leave the ANE.
    """
    best = taken = first_largest(scores, classes, axes)
    for _ in range(1, number):
        scores = scores - FAR * best
        best = first_largest(scores, classes, axes)
        taken = taken + best
    return taken


class Correction(Leaf):
    """Learnt numbers that are added to scores before experts are chosen. They even out how many
    tokens an expert gets."""

    numbers: Tensor

    def __init__(self, count: int) -> None:
        super().__init__()
        self.hold_channels("numbers", count, pick=less_their_mean)

    def forward(self, scores: Tensor) -> Tensor:
        return scores + self.numbers


def less_their_mean(stored: Tensor) -> Tensor:
    """Numbers of which only the differences matter, in fp32. Released ones lie close together and
    far from zero, where fp16 is coarse."""
    return stored.float() - stored.float().mean()


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
    chosen: int | None = None,
    **more: Any,
) -> Mixture:
    """The mixture of a config: `count` experts of `inner` channels, of which a token takes
    `chosen`, by default as many as the config says of all layers. `factor` is that on outputs
    beside the residual stream's; `more` are other fields of `Mixture`."""
    return Mixture(
        hidden=config.hidden_size,
        inner=inner,
        count=count,
        chosen=config.num_experts_per_tok if chosen is None else chosen,
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
    """Some experts as one MLP: their inner channels lie side by side."""

    def __init__(self, mixture: Mixture, start: int, stop: int, bias: bool = False) -> None:
        """`bias` says whether gates and ups have biases."""
        super().__init__()
        self.start, self.stop = start, stop
        inner = (stop - start) * mixture.inner
        hidden, inverse = mixture.hidden, mixture.inverse
        if mixture.gated:
            self.gate_proj = Projection(hidden, inner, "experts", bias, inverse=inverse)
        self.up_proj = Projection(hidden, inner, "experts", bias, inverse=inverse)
        self.down_proj = Projection(inner, hidden, "experts", factor=mixture.factor)
        self.act, self.gated = activation(mixture.act), mixture.gated
        self.stored = stored_rows(mixture)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """What these experts add to the residual stream, a hidden tensor like `x (1, H, 1, T)`.

        `weights (1, E, 1, T)` are those of all experts of the layer.
        """
        up = self.up_proj(x)
        inner = self.act(self.gate_proj(x)) * up if self.gated else self.act(up)
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
    its up rows, or `(E, I, H)` has its up rows; the other `(E, H, I)` has its output rows."""
    hidden, inner = mixture.hidden, mixture.inner
    down = {"down_proj.weight": StackedRows("down_proj", (hidden, inner), side_by_side)}
    if not mixture.gated:
        pick = partial(rows_of, 0, inner)
        return {"up_proj.weight": StackedRows("up_proj", (inner, hidden), pick)} | down
    gate_up = (2 * inner, hidden)
    return {
        "gate_proj.weight": StackedRows("gate_up_proj", gate_up, partial(rows_of, 0, inner)),
        "up_proj.weight": StackedRows("gate_up_proj", gate_up, partial(rows_of, inner, 2 * inner)),
    } | down


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
        names: tuple[str, ...] = GATED,
    ) -> None:
        """`names` are the checkpoint's for the MLP."""
        super().__init__()
        self.expert = MLP(hidden, inner, act, bias, factor, names=names)
        self.gate = Projection(hidden, 1, None) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.expert(x)
        return made if self.gate is None else made * sigmoid(self.gate(x))


class MixtureBlock(RoutedBlock):
    """A layer's router and experts, perhaps behind a norm. The residual stream may be scaled."""

    reads = ("hidden",)
    adds = True
    scores = WEIGHTS
    deciding = "router_proj"

    def __init__(
        self,
        mixture: Mixture,
        index: int,
        norm: Norm | None,
        router: str = "gate",
        bias: bool = False,
        group: Callable[[Mixture, int, int], MixtureExperts] = MixtureExperts,
        shared: SharedExpert | None = None,
        shared_name: str = "mlp.shared_expert",
        names: PartNames = NAMES,
        correction: str | None = None,
    ) -> None:
        """`router` and `correction` are the checkpoint's names in `names.mlp`, `shared_name` that
        in the layer; `bias` is the router's."""
        super().__init__(f"moe-{index:02}", index, f"model.layers.{index}.")
        self.mixture, self.chosen, self.together = mixture, mixture.chosen, mixture.together
        self.axes, self.router_name, self.names = Axes(), router, names
        self.bounded = mixture.bounded
        self.shared, self.shared_name = shared, shared_name
        self.read = "hidden" if norm is None else NORMED
        self.add_module(names.mlp_norm, norm)
        size, count = mixture.hidden, mixture.count
        self.router_proj = Projection(size, count, None, bias, inverse=mixture.inverse)
        self.correction_name = correction
        self.correction = Correction(count) if correction else None
        self.groups = nn.ModuleList(group(mixture, *bounds) for bounds in mixture.bounds())

    def weight(self, path: str, shape: tuple[int, ...], held: Held) -> Weight:
        home = self.names.mlp
        place, _, rest = path.partition(".")
        if place == "router_proj":
            return super().weight(f"{home}.{self.router_name}.{rest}", shape, held)
        if place == "correction":
            return super().weight(f"{home}.{self.correction_name}", shape, held)
        if place == "shared":
            part, _, leaf = rest.partition(".")
            name = self.shared_name if part == "expert" else f"{self.shared_name}_gate"
            return super().weight(f"{name}.{leaf}", shape, held)
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
            flow[self.sum] = flow[self.sum] + self.share(number, flow)

    def route(self, flow: Flow) -> None:
        if self.read == NORMED:
            flow[NORMED] = self.get_submodule(self.names.mlp_norm)(flow["hidden"])
        logits = self.router_proj(flow[self.read])
        flow[WEIGHTS] = self.mixture.weigh(logits, self.axes, self.correction)
        self.begin(flow)

    def compared(self, flow: Flow) -> tuple[Tensor, ...]:
        if not self.bounded:
            return super().compared(flow)
        logits = self.router_proj(flow[self.read])
        return logits, *self.mixture.far(logits, self.axes)

    def begin(self, flow: Flow) -> None:
        """Begin the sum of experts, with those that all tokens share."""
        if self.shared is not None:
            flow["hidden"] = flow["hidden"] + self.shared(flow[self.read])

    @property
    def sum(self) -> str:
        """The tensor to which each group of experts adds."""
        return self.writes[0]

    def share(self, number: int, flow: Flow) -> Tensor:
        """What a group of experts adds."""
        shared: Tensor = self.groups[number](flow[self.read], flow[WEIGHTS])
        return shared

    def run_group(self, number: int, flow: Flow) -> None:
        flow[self.sum] = self.share(number, flow)

    def router(self) -> Part:
        normed = (NORMED,) if self.read == NORMED else ()
        return MixtureRouter(
            name=f"{self.name}-router",
            whole=self,
            modules=(self.names.mlp_norm, "router_proj", "correction", "shared"),
            reads=("hidden",),
            writes=(*normed, WEIGHTS, *((self.sum,) if self.begins else ())),
            run=self.route,
        )

    @property
    def begins(self) -> bool:
        """Whether the router writes the sum before any expert adds to it."""
        return self.shared is not None

    def experts(self) -> tuple[Part, ...]:
        return tuple(
            Part(
                name=f"{self.name}-expert-{number:02}",
                whole=self,
                modules=(f"groups.{number}",),
                reads=(self.read, WEIGHTS),
                writes=(self.sum,),
                run=partial(self.run_group, number),
            )
            for number in range(len(self.groups))
        )


class SummedBlock(MixtureBlock):
    """Router and experts whose sum `SUM` goes through a norm, `SumNorm`, before it is added to the
    residual stream."""

    writes = (SUM,)
    begins = True

    def truths(self) -> dict[str, Truth]:
        return {SUM: (f"{self.prefix}{self.names.mlp}", 0)}

    def begin(self, flow: Flow) -> None:
        """The host adds what experts give, so without shared ones the sum begins with zeros."""
        x = flow[self.read]
        flow[SUM] = x * 0 if self.shared is None else self.shared(x)


class SumNorm(Block):
    """The norm behind a `SummedBlock`, and the residual stream's sum with what it gives."""

    reads = ("hidden", SUM)

    def __init__(self, index: int, name: str, norm: RMSNorm) -> None:
        """`name` is the checkpoint's for the norm."""
        super().__init__(f"norm-{index:02}", index, f"model.layers.{index}.")
        self.normed = name
        self.add_module(name, norm)

    def forward(self, flow: Flow, memory: Memory) -> None:
        flow["hidden"] = flow["hidden"] + self.get_submodule(self.normed)(flow[SUM])


class MixtureRouter(Part):
    """The router of a layer. No module of transformers gives its tensors."""

    def truths(self) -> dict[str, Truth]:
        return {}


def expert_channels(mixture: Mixture | None) -> dict[str, int]:
    """The channels of the tensors between routers and experts; none without experts."""
    return {} if mixture is None else {NORMED: mixture.hidden, WEIGHTS: mixture.count}
