"""The structure question: is the graph right? It compares the twin with the model.

The twin has the checkpoint's own values. In fp32, a right port errs only by the order of its sums,
some 1e-6, with any compression. So the limit is near that, and one wrong token in one mode refuses
a port.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from pydantic import Field

from cetane.engine.backend import Array
from cetane.families import Truth
from cetane.gates import metrics
from cetane.gates.experts import Choices, routed_blocks
from cetane.gates.limits import limits
from cetane.gates.observe import ProbeTask, Seen
from cetane.gates.probes import WORK, HostWay, Probe
from cetane.gates.reference import Observed, Reference
from cetane.gates.verdict import Check, at_most
from cetane.planner import Planner
from cetane.planner.weights import weight_count
from cetane.schema.function import Function
from cetane.schema.interface import ToChoice, ToLogits
from cetane.schema.plan import Plan
from cetane.schema.recipe import Mode
from cetane.validation import Data

LOGITS: Truth = ("lm_head", 0)
ONE_LOGIT = "one logit"
"""The name by which each logit is judged, and not the row of all."""
SCORES, MOST_SCORES = 2 << 30, 8 << 30
"""Bytes that the model's attention may take for a text, and for a text that must exceed a window. A
model with eager attention holds the scores of all heads at once."""
SCORE = 12
"""Bytes that one score takes: three fp32 numbers, with its softmax and an intermediate result."""
TIMES = 8
"""How often random tokens take each expert, on average: one of some 3,000 is left out by chance."""
WINDOWS = "sliding_window", "attention_chunk_size"
"""The fields of a config that say how many attention keys some layers see."""


WAYS: dict[HostWay, str] = {
    "rewind": "tokens after a rewind",
    "draft": "tokens after a draft",
    "tree": "tokens after a tree",
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
    """The error of the worst token: norm of the difference over norm of the truth. Of `ONE_LOGIT`,
    the largest difference over the root mean square of the truth."""
    position: int
    """The position of the worst token."""
    positions: int
    """The number of compared tokens."""
    undecided: float = Field(default=0.0, exclude=True)
    decided: int | None = Field(default=None, exclude=True)
    """Only older results have these two: of tokens from the first near tie of experts on."""
    way: HostWay = ""
    """How the host took these tokens."""

    @property
    def limit(self) -> float:
        """The largest error that is allowed."""
        asked = limits().structure
        return asked.one_logit if self.tensor == ONE_LOGIT else asked.relative


def deviations(
    plan: Plan,
    planner: Planner,
    tasks: Sequence[ProbeTask],
    seen: Sequence[Seen],
    truths: "ModelResults",
) -> Iterator[Deviation]:
    """The deviations of every tensor of every task, in the order of shards; logits come last."""
    places = made_by(planner, plan)
    for task, ours in zip(tasks, seen, strict=True):
        theirs = truths.of(task.probe, task.mode)
        for truth, (at, rows) in ours.tensors.items():
            shard, tensor = places[truth]
            errors = metrics.relative(rows, theirs.tensors[truth][at])
            for way, some in task.ways(at):
                yield deviation(shard, tensor, truth, task, at[some], errors[some], way)
        head, wanted = plan.tokens(0, plan.rows), truths.logits(task.probe, ours.at, task.mode)
        yield from logit_deviations(plan, task, ours.at, ours.logits[:, head], wanted[:, head])


def logit_deviations(
    plan: Plan, task: ProbeTask, at: Array, ours: Array, theirs: Array
) -> Iterator[Deviation]:
    """The deviations of logits `(n, rows)` of the tokens `at (n,)`.

    The norm of a row hardly shows one wrong logit of a large vocabulary, so each is judged too. Not
    so in what a host does beside reading, which changes tokens and no single logit.
    """
    last, errors = plan.shards[-1].name, logit_errors(plan, ours, theirs)
    for way, some in task.ways(at):
        yield deviation(last, "logits", LOGITS, task, at[some], errors[some], way)
        if not way and not plan.recipe.head.choose:
            each = metrics.largest(ours[some], theirs[some])
            yield deviation(last, ONE_LOGIT, LOGITS, task, at[some], each)


def differ(theirs: Observed, ours: Choices) -> bool:
    """Whether a port chose other experts than the model where the model is undecided."""
    tie = limits().structure.tie
    for layer, (at, experts) in ours.items():
        if layer in theirs.margins:
            near = theirs.margins[layer][at] < tie
            if (experts[near] != theirs.experts[layer][at][near]).any():
                return True
    return False


class ModelResults:
    """The model's results on probes: tensors of all tokens, and logits of those that a port was
    judged on."""

    def __init__(
        self,
        observed: dict[str, Observed],
        kept: dict[str, Array],
        following: dict[tuple[Mode, str], Observed],
    ) -> None:
        """All are by the probe's name. `kept` are the numbers of the tokens with logits, ascending;
        `following` are a mode's own results, where it chose other experts near ties."""
        self.observed, self.kept, self.following = observed, kept, following

    @classmethod
    def ask(
        cls, reference: Reference, tasks: Sequence[ProbeTask], seen: Sequence[Seen],
        others: Sequence[Truth] = (), scale: float = 1.0,
    ) -> "ModelResults":  # fmt: skip
        """Ask the model for all that a port computed for some tasks, and for `others`.

        Where the model's choice of experts is a near tie, it takes those that the port shows.
        Hidden tensors are multiplied by `scale`, as the port's are."""
        judged: dict[str, list[Array]] = {}
        for task, ours in zip(tasks, seen, strict=True):
            judged.setdefault(task.probe.name, []).append(ours.at)
        kept = {name: np.unique(np.concatenate(numbers)) for name, numbers in judged.items()}
        wanted = dict.fromkeys([*others, *(truth for ours in seen for truth in ours.tensors)])

        def ask(probes: Sequence[Probe], choices: Sequence[Choices] = ()) -> list[Observed]:
            observed = reference.run(
                [probe.tokens for probe in probes],
                list(wanted),
                [probe.start for probe in probes],
                [probe.scale for probe in probes],
                [kept[probe.name].tolist() for probe in probes],
                choices=choices,
            )
            return [one.scaled(scale) for one in observed]

        probes = {task.probe.name: task.probe for task in tasks}
        observed = dict(zip(probes, ask([*probes.values()]), strict=True))
        following: dict[tuple[Mode, str], Observed] = {}
        for mode in dict.fromkeys(task.mode for task in tasks):  # each takes as much memory
            differing = [
                (task.probe, ours.choices)
                for task, ours in zip(tasks, seen, strict=True)
                if task.mode == mode and differ(observed[task.probe.name], ours.choices)
            ]
            if differing:
                mine, choices = zip(*differing, strict=True)
                own = ask(mine, choices)
                following |= {(mode, p.name): one for p, one in zip(mine, own, strict=True)}
        return cls(observed, kept, following)

    def of(self, probe: Probe, mode: Mode | None = None) -> Observed:
        """The results on a probe; with a mode, those to compare with what that mode computed."""
        if mode is not None and (mode, probe.name) in self.following:
            return self.following[mode, probe.name]
        return self.observed[probe.name]

    def logits(self, probe: Probe, at: Array, mode: Mode | None = None) -> Array:
        """Logits `(n, V)` of some tokens of a probe; the mode as in `of`."""
        rows: Array = self.of(probe, mode).logits[np.searchsorted(self.kept[probe.name], at)]
        return rows


def filled(planner: Planner, plan: Plan, reference: Reference) -> int:
    """The number of tokens with which the text probe fills caches: all that time and memory allow.

    It reaches the model's largest window, if memory allows, whatever the plan says of windows."""
    heads = reference.model.config.num_attention_heads
    by_time = affordable(planner, plan)
    by_memory, most = (math.isqrt(size // (SCORE * heads)) for size in (SCORES, MOST_SCORES))
    return max(min(by_time, by_memory), min(largest_window(plan, reference), most))


def tokens_for_experts(planner: Planner, plan: Plan) -> int:
    """The number of random tokens that reach nearly all experts, if their routers are fair and time
    allows: each expert is then taken `TIMES` times on average."""
    routed = routed_blocks(planner.model.layers).values()
    shares = (planner.model.channels[block.scores] / block.chosen for block in routed)
    return min(math.ceil(TIMES * max(shares, default=0)), affordable(planner, plan))


def affordable(planner: Planner, plan: Plan) -> int:
    """The number of tokens that may be read in every mode, as far as time allows."""
    return WORK // (weight_count(planner.blocks) * len(plan.modes))


def largest_window(plan: Plan, reference: Reference) -> int:
    """The most keys that the model's windowed layers see; 0 if all layers see the context."""
    windows = (getattr(reference.model.config, name, None) or 0 for name in WINDOWS)
    return max((own for own in windows if own < plan.recipe.cache.context), default=0)


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
    way: HostWay = "",
) -> Deviation:
    """The deviation of one tensor: its `errors (n,)` at the tokens `at (n,)`, all taken one way."""
    worst = int(errors.argmax())
    return Deviation(
        shard=shard,
        tensor=tensor,
        truth=truth[0],
        mode=task.mode,
        probe=task.probe.name,
        relative=min(float(errors[worst]), 1e308),
        position=task.probe.start + int(at[worst]),
        positions=len(errors),
        way=way,
    )


def logit_errors(plan: Plan, ours: Array, theirs: Array) -> Array:
    """The relative errors `(n,)` of logits `(n, rows)`, for the rows of a head.

    A head that gives only choices is judged by the worst of its slices, even where another slice
    has a larger logit. A user's tokens may choose a slice that no probe chooses. A slice has two
    errors, and the larger one counts. One is how far its choice's true logit is below the slice's
    best one, the other the error of the choice's own logit. Both are over the root mean square of
    the true logits.
    """
    if not plan.recipe.head.choose:
        return metrics.relative(ours, theirs)
    slices = head_slices(plan.functions.values())
    errors = [choice_errors(ours[:, start:stop], theirs[:, start:stop]) for start, stop in slices]
    relative: Array = np.max(errors, axis=0) / np.sqrt(np.square(theirs).mean(1))
    return np.nan_to_num(relative, nan=np.inf)


def choice_errors(ours: Array, theirs: Array) -> Array:
    """The larger of the two errors `(n,)` of a slice's choice, from logits `(n, rows)`."""
    rows, chosen = np.arange(len(ours)), ours.argmax(1)
    short = theirs.max(1) - theirs[rows, chosen]
    return np.maximum(short, np.abs(ours[rows, chosen] - theirs[rows, chosen]))


def head_slices(functions: Iterable[Function]) -> set[tuple[int, int]]:
    """The rows of the head that functions compute, or choose among: where each slice begins and
    stops."""
    sinks = (item.sink for function in functions for item in function.outputs)
    return {(sink.start, sink.stop) for sink in sinks if isinstance(sink, ToLogits | ToChoice)}


OTHER_PLAN = "structure: parts of the plan that differ from the recipe's"
OTHER_TAGS = "structure: tags that differ from the recipe's"


def other_parts(plan: Plan, wanted: Plan) -> list[str]:
    """The fields of a bundle's plan that are not as its recipe makes them."""
    return [name for name in Plan.model_fields if getattr(plan, name) != getattr(wanted, name)]


def same_plan(plan: Plan, wanted: Plan) -> Check:
    """Whether a plan is the one that its recipe makes.

    Probes cannot show this. A route knows an expert by its place alone, and perhaps no token of a
    probe chooses a rare expert. No probe depends on sizes in bytes, which cards and reports
    print."""
    return at_most(OTHER_PLAN, float(len(other_parts(plan, wanted))), 0)


def same_tags(found: Mapping[str, str], wanted: Mapping[str, str]) -> Check:
    """Whether a manifest's tags are those that its recipe makes; no tags at all say nothing
    wrong."""
    others = set(found.items()) ^ set(wanted.items()) if found else ()
    return at_most(OTHER_TAGS, float(len({name for name, _ in others})), 0)


def judge_structure(rows: Sequence[Deviation], question: str = "structure: ") -> Iterator[Check]:
    """The checks of the worst deviation of every shard's tensors, in every mode. Their names begin
    with the question.

    What a host does has one check for all shards: its code knows no shard."""
    worst: dict[str, Deviation] = {}
    for one in rows:
        what = WAYS[one.way] if one.way else f"{one.tensor} of {one.shard}"
        name = f"{question}{what} ({one.mode})"
        worst[name] = max(worst.get(name, one), one, key=lambda row: row.relative)
    for name, one in worst.items():
        yield at_most(name, one.relative, one.limit)
