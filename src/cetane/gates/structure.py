"""The structure question: is the graph right? It compares the twin with the model.

The twin has the checkpoint's own values. In fp32, a right port errs only by the order of its sums,
some 1e-6, with any compression. So the limit is near that, and one wrong token in one mode refuses
a port.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from cetane.engine.backend import Array
from cetane.families import RoutedBlock, Truth
from cetane.gates import metrics
from cetane.gates.limits import limits
from cetane.gates.observe import ProbeTask, Seen
from cetane.gates.probes import Probe, Way
from cetane.gates.reference import Observed, Reference, layer_of
from cetane.gates.verdict import Check, at_most
from cetane.planner import Planner
from cetane.schema.plan import Plan
from cetane.schema.recipe import Mode
from cetane.validation import Data

LOGITS: Truth = ("lm_head", 0)
WORK = 10**13
"""Products of weights and tokens that a text may cost in all modes: some minutes on two cores."""
SCORES, MOST_SCORES = 2 << 30, 8 << 30
"""Bytes that the model's attention may take for a text, and for a text that must exceed a window. A
model with eager attention holds the scores of all heads at once."""
SCORE = 12
"""Bytes that one score takes: three fp32 numbers, with its softmax and an intermediate result."""
WINDOWS = "sliding_window", "attention_chunk_size"
"""The fields of a config that say how many attention keys some layers see."""


WAYS: dict[Way, str] = {
    "rewind": "tokens after a rewind",
    "draft": "tokens after a refused draft",
    "tree": "tokens after a refused branch",
    "last": "logits of a last token alone",
}
"""What is judged of a host, in words."""


class Deviation(Data):
    """The distance of a tensor of the twin from its truth, at the worst token of a probe."""

    shard: str
    tensor: str
    truth: str
    """Path of the Hugging Face module."""
    mode: Mode
    probe: str
    relative: float
    """The error of the worst token: norm of the difference over norm of the truth. With routed
    experts, only tokens before the first near tie count."""
    position: int
    """The position of the worst token."""
    positions: int
    """The number of compared tokens."""
    undecided: float = 0.0
    """The error that `structure.routed.share` of the mode's own tokens from the first near tie on
    do not exceed; 0 without such tokens."""
    decided: int | None = None
    """The number of tokens before the first near tie of experts; None in older results."""
    way: Way = ""
    """How the host took these tokens."""


def deviations(
    plan: Plan, planner: Planner, tasks: Sequence[ProbeTask], seen: Sequence[Seen], truths: "Truths"
) -> Iterator[Deviation]:
    """The deviations of every tensor of every task, in the order of shards; logits come last."""
    places = made_by(planner, plan)
    for task, ours in zip(tasks, seen, strict=True):
        theirs = truths.of(task.probe)
        for truth, (at, rows) in ours.tensors.items():
            shard, tensor = places[truth]
            errors = metrics.relative(rows, theirs.tensors[truth][at])
            first = first_undecided(theirs, truth)
            for way, some in task.ways(at):
                yield deviation(shard, tensor, truth, task, at[some], errors[some], first, way)
        head, wanted = plan.tokens(0, plan.rows), truths.logits(task.probe, ours.at)
        errors = logit_errors(plan, ours.logits[:, head], wanted[:, head])
        first, last = first_undecided(theirs, LOGITS), plan.shards[-1].name
        for way, some in task.ways(ours.at):
            at = ours.at[some]
            yield deviation(last, "logits", LOGITS, task, at, errors[some], first, way)


def first_undecided(theirs: Observed, truth: Truth) -> int | None:
    """The number of the first token whose experts may depend on rounding; None without one.

    Only layers on which the tensor depends count. Later tokens attend to this one."""
    layer, tie = layer_of(truth[0]), limits().structure.routed.tie
    ties = [
        np.flatnonzero(margins < tie)
        for number, margins in theirs.margins.items()
        if layer is None or number <= layer
    ]
    return min((int(one[0]) for one in ties if len(one)), default=None)


def is_routed(planner: Planner) -> bool:
    """Whether tokens choose experts."""
    return any(isinstance(block, RoutedBlock) for block in planner.model.layers)


class Truths:
    """The model's results on probes: tensors of all tokens, and logits of those that a port was
    judged on."""

    def __init__(self, observed: dict[str, Observed], kept: dict[str, Array]) -> None:
        """Both are by the probe's name; `kept` are the numbers of the tokens with logits,
        ascending."""
        self.observed, self.kept = observed, kept

    @classmethod
    def ask(
        cls, reference: Reference, tasks: Sequence[ProbeTask], seen: Sequence[Seen],
        others: Sequence[Truth] = (), scale: float = 1.0,
    ) -> "Truths":  # fmt: skip
        """Ask the model for all that a port computed for some tasks, and for `others`.

        Hidden tensors are multiplied by `scale`, as the port's are."""
        probes = {task.probe.name: task.probe for task in tasks}
        judged: dict[str, list[Array]] = {}
        for task, ours in zip(tasks, seen, strict=True):
            judged.setdefault(task.probe.name, []).append(ours.at)
        kept = {name: np.unique(np.concatenate(numbers)) for name, numbers in judged.items()}
        wanted = dict.fromkeys([*others, *(truth for ours in seen for truth in ours.tensors)])
        observed = reference.run(
            [probe.tokens for probe in probes.values()],
            list(wanted),
            [probe.start for probe in probes.values()],
            [probe.scale for probe in probes.values()],
            [kept[name].tolist() for name in probes],
        )
        scaled = [one.scaled(scale) for one in observed]
        return cls(dict(zip(probes, scaled, strict=True)), kept)

    def of(self, probe: Probe) -> Observed:
        return self.observed[probe.name]

    def logits(self, probe: Probe, at: Array) -> Array:
        """Logits `(n, V)` of some tokens of a probe."""
        rows: Array = self.of(probe).logits[np.searchsorted(self.kept[probe.name], at)]
        return rows


def filled(planner: Planner, plan: Plan, reference: Reference) -> int:
    """The number of tokens with which the text probe fills caches: all that time and memory allow.

    It reaches the model's largest window, if memory allows, whatever the plan says of windows."""
    heads = reference.model.config.num_attention_heads
    by_time = WORK // (elements(planner) * len(plan.modes))
    by_memory, most = (math.isqrt(size // (SCORE * heads)) for size in (SCORES, MOST_SCORES))
    return max(min(by_time, by_memory), min(largest_window(plan, reference), most))


def largest_window(plan: Plan, reference: Reference) -> int:
    """The most keys that the model's windowed layers see; 0 if all layers see the context."""
    windows = (getattr(reference.model.config, name, None) or 0 for name in WINDOWS)
    return max((own for own in windows if own < plan.recipe.cache.context), default=0)


def elements(planner: Planner) -> int:
    """The number of a model's weights, those of the head included."""
    return sum(weight.elements for block in planner.blocks for _, weight in block.weights())


def made_by(planner: Planner, plan: Plan) -> dict[Truth, tuple[str, str]]:
    """By tensor, the shard that makes it, and its name in the shard."""
    return {
        truth: (step.shard, name.removesuffix("_out"))
        for mode in plan.modes
        for step, outputs in planner.truths(mode).items()
        for name, truth in outputs.items()
    }


def deviation(
    shard: str,
    tensor: str,
    truth: Truth,
    task: ProbeTask,
    at: Array,
    errors: Array,
    first: int | None,
    way: Way = "",
) -> Deviation:
    """The deviation of one tensor: its `errors (n,)` at the tokens `at (n,)`, all taken one way.

    From the token `first` on, the model is undecided; None if it never is."""
    decided = at < (np.inf if first is None else first)
    # A share of all tokens would be one of the widest mode's: it takes most of a probe.
    strict, rest = np.where(decided, errors, 0.0), errors[~decided & task.own(at)]
    worst = int(strict.argmax())
    share = limits().structure.routed.share
    return Deviation(
        undecided=min(metrics.within(rest, share), 1e308) if len(rest) else 0.0,
        decided=int(decided.sum()),
        shard=shard,
        tensor=tensor,
        truth=truth[0],
        mode=task.mode,
        probe=task.probe.name,
        relative=min(float(strict[worst]), 1e308),
        position=task.probe.start + int(at[worst]),
        positions=len(errors),
        way=way,
    )


def logit_errors(plan: Plan, ours: Array, theirs: Array) -> Array:
    """The relative errors `(n,)` of logits `(n, V)`, for the tokens of a head or of its slice.

    A head that gives only its choice has two errors, and the larger one counts. One is how far the
    choice's true logit is below the best one, the other the error of the choice's own logit. Both
    are over the root mean square of the true logits.
    """
    if not plan.recipe.head.choose:
        return metrics.relative(ours, theirs)
    rows, chosen = np.arange(len(ours)), ours.argmax(1)
    short = theirs.max(1) - theirs[rows, chosen]
    off = np.abs(ours[rows, chosen] - theirs[rows, chosen])
    errors: Array = np.maximum(short, off) / np.sqrt(np.square(theirs).mean(1))
    return np.nan_to_num(errors, nan=np.inf)


def excess(one: Deviation) -> float:
    """The error to compare with `structure.relative`. The error after a near tie of experts is
    first scaled by the ratio of both limits."""
    ask = limits().structure
    return max(one.relative, one.undecided * ask.relative / ask.routed.relative)


OTHER_PLAN = "structure: parts of the plan that differ from the recipe's"


def other_parts(plan: Plan, wanted: Plan) -> list[str]:
    """The fields of a bundle's plan that are not as its recipe makes them."""
    return [name for name in Plan.model_fields if getattr(plan, name) != getattr(wanted, name)]


def same_plan(plan: Plan, wanted: Plan) -> Check:
    """Whether a plan is the one that its recipe makes.

    Probes cannot show this. A route knows an expert by its place alone, and perhaps no token of a
    probe chooses a rare expert. No probe reads sizes, which cards and reports tell."""
    return at_most(OTHER_PLAN, float(len(other_parts(plan, wanted))), 0)


def judge(rows: Sequence[Deviation]) -> Iterator[Check]:
    """The checks of the worst deviation of every shard's tensors, in every mode.

    What a host does has one check for all shards: its code knows no shard."""
    worst: dict[str, float] = {}
    for one in rows:
        what = WAYS[one.way] if one.way else f"{one.tensor} of {one.shard}"
        name = f"structure: {what} ({one.mode})"
        worst[name] = max(worst.get(name, 0.0), excess(one))
    for name, value in worst.items():
        yield at_most(name, value, limits().structure.relative)
