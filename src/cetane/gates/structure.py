"""The structure question: is the graph right? It compares the twin with the model.

The twin has the checkpoint's own values. In fp32, a right port errs only by the order of its sums,
some 1e-6, with any compression. So the limit is near that, and one wrong token in one mode refuses
a port.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from pydantic import Field

from cetane.engine.backend import Array
from cetane.engine.logits import HeadRows
from cetane.families import Truth
from cetane.gates import metrics
from cetane.gates.heads import head_slices
from cetane.gates.limits import limits
from cetane.gates.model_results import ModelResults
from cetane.gates.observe import ProbeTask, Seen
from cetane.gates.probes import HostWay
from cetane.gates.verdict import Check, at_most
from cetane.planner import Planner
from cetane.schema.plan import Plan
from cetane.schema.recipe import Mode
from cetane.validation import Data

LOGITS: Truth = ("lm_head", 0)
LOST = 1e308
"""The error of infinity and NaN: JSON has neither."""
ONE_LOGIT = "one logit"
"""The name by which each logit is judged, and not the row of all."""


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
    capacity: int | None = Field(default=None, exclude_if=lambda capacity: capacity is None)
    """The capacity of the functions that took them, if the plan has several."""

    @property
    def lost(self) -> bool:
        """Whether the tensor has infinity or NaN."""
        return self.relative >= LOST

    @property
    def told(self) -> str:
        """The mode, and the capacity if there are several."""
        return self.mode if self.capacity is None else f"{self.mode} at {self.capacity}"

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
    truths: ModelResults,
) -> Iterator[Deviation]:
    """The deviations of every tensor of every task, in the order of shards; logits come last."""
    places = made_by(planner, plan)
    for task, ours in zip(tasks, seen, strict=True):
        theirs = truths.of(task.probe, task.mode)
        for truth, (at, rows) in ours.tensors.items():
            shard, tensor = places[truth]
            errors = metrics.relative(rows, theirs.tensors[truth][at])
            for way, capacity, some in ours.taken(task, at):
                yield deviation(shard, tensor, truth, task, at[some], errors[some], way, capacity)
        yield from logit_deviations(plan, task, ours, truths)
        yield from logits_behind_choices(plan, task, ours, truths)


def logit_deviations(
    plan: Plan, task: ProbeTask, seen: Seen, truths: ModelResults
) -> Iterator[Deviation]:
    """The deviations of a task's logits.

    The norm of a row hardly shows one wrong logit of a large vocabulary, so each is judged too. Not
    so in what a host does beside reading, which changes tokens and no single logit.
    """
    last, at, head = plan.shards[-1].name, seen.at, plan.tokens(0, plan.rows)
    ours, theirs = seen.logits[:, head], truths.logits(task.probe, at, task.mode)[:, head]
    errors = logit_errors(plan, ours, theirs)
    for way, capacity, some in seen.taken(task, at):
        yield deviation(last, "logits", LOGITS, task, at[some], errors[some], way, capacity)
        if not way and not plan.recipe.head.choose:
            each = metrics.largest(ours[some], theirs[some])
            yield deviation(last, ONE_LOGIT, LOGITS, task, at[some], each, way, capacity)


def logits_behind_choices(
    plan: Plan, task: ProbeTask, ours: Seen, truths: ModelResults
) -> Iterator[Deviation]:
    """The deviations of each logit among which a head chooses, if the port shows them."""
    capped = HeadRows(plan).capped
    for (start, stop), (at, rows) in ours.slices.items():
        for way, capacity, some in ours.taken(task, at):
            if not way:
                number = at[some]
                wanted = truths.logits(task.probe, number, task.mode)[:, plan.tokens(start, stop)]
                errors = metrics.largest(capped(rows[some]), wanted)
                last = plan.shards[-1].name
                yield deviation(last, ONE_LOGIT, LOGITS, task, number, errors, way, capacity)


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
    capacity: int | None = None,
) -> Deviation:
    """The deviation of one tensor: its `errors (n,)` at the tokens `at (n,)`, all taken one way and
    at one capacity."""
    worst = int(errors.argmax())
    return Deviation(
        shard=shard,
        tensor=tensor,
        truth=truth[0],
        mode=task.mode,
        probe=task.probe.name,
        relative=min(float(errors[worst]), LOST),
        position=task.probe.start + int(at[worst]),
        positions=len(errors),
        way=way,
        capacity=capacity,
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


def judge_structure(rows: Sequence[Deviation], question: str = "structure: ") -> Iterator[Check]:
    """The checks of the worst deviation of every shard's tensors, in every mode and capacity. Their
    names begin with the question.

    What a host does has one check for all shards: its code knows no shard."""
    worst: dict[str, Deviation] = {}
    for one in rows:
        what = WAYS[one.way] if one.way else f"{one.tensor} of {one.shard}"
        name = f"{question}{what} ({one.told})"
        worst[name] = max(worst.get(name, one), one, key=lambda row: row.relative)
    for name, one in worst.items():
        yield at_most(name, one.relative, one.limit)
