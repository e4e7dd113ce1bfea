"""The loss by narrower arithmetic: a port's programs against themselves in fp32.

*fp16* rounds every result. It is judged on starts of prompts in every mode, which end with the
text's largest token. It is also judged on the text in the widest mode: any token may leave fp16's
range.

*ane* also computes attention's products as an ANE was seen to (docs/explanation/precision.md). The
errors of these products grow with the number of keys, so *ane* is judged late in the context. The
prefix runs in fp32, which is fast, and only the last calls run in both arithmetics.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np

from cetane.engine.backend import Array
from cetane.engine.engine import Engine
from cetane.engine.session import Session
from cetane.families import Truth
from cetane.gates import metrics
from cetane.gates.experts import Choices, TakenExperts
from cetane.gates.limits import limits
from cetane.gates.observe import ProbeTask, Seen, observe
from cetane.gates.port import Port
from cetane.gates.probes import WORK, Probe, begun, whole_parts
from cetane.gates.structure import made_by
from cetane.gates.verdict import Check, at_least, at_most
from cetane.mil.ane import SHORT
from cetane.schema.plan import Plan
from cetane.schema.recipe import Mode
from cetane.validation import Data

QUANTIZED = "activations: "
"""The start of the names of all checks on activations of 8 bits."""


Seek = Callable[[Sequence[ProbeTask], Sequence[Seen], Session], None]
"""Gets tasks, their results, and the session from which they went on."""


class Rounding(Data):
    """The loss of a mode in a narrower arithmetic, against the same programs in fp32."""

    mode: Mode
    """The mode that is judged; of a text with infinity or NaN, the mode that took the first such
    token."""
    positions: int
    keys: int = 0
    """The tokens that the last position attends to."""
    hidden_cosine: float
    """The smallest mean cosine of any output of a shard."""
    logit_cosine: float
    """The mean cosine of a token's logits. For a head that gives only its choices, the cosine of
    one row: the logits of all choices."""
    kl: float
    """The mean KL from fp32, in nats a token; 0 for a head that gives only its choices."""
    finite: bool
    """Whether no result has infinity or NaN."""
    other_experts: float | None = None
    """The share of the choices of experts that are not those in fp32; None without experts. Tokens
    with other experts count in no cosine and no KL."""
    other_far: float | None = None
    """The share of the chosen experts below which others are far than in fp32; None for a model
    without far experts (`RoutedBlock.bounded`)."""
    chooses: bool = False
    """Whether the head gives tokens and no logits."""
    other_choices: int = 0
    """The decided tokens for which such a head gives another token than in fp32."""
    capacity: int | None = None
    """The capacity of its functions, if the plan has several."""
    where: str = ""
    """The first shard whose output has infinity or NaN."""
    text: bool = False
    """Whether it read a text, rather than the start of a prompt or the end of a context."""

    @property
    def told(self) -> str:
        """What ran, in brackets."""
        at = "" if self.capacity is None else f", at {self.capacity}"
        return f"({self.mode}{', text' if self.text else ''}{at})"


def late_rounding(port: Port, weights: int, seek: Seek = lambda *_: None) -> list[Rounding]:
    """The loss in an ANE's arithmetic at the end of each capacity, one result a mode.

    `weights` is the model's number of weights. Capacities that are too short for this arithmetic's
    rules to apply have none. `seek` gets all results.
    """
    long = [one.tokens for one in port.plan.capacities if one.tokens >= SHORT]
    return [one for tokens in long for one in LateCalls(port, weights, tokens).loss(seek)]


class LateCalls:
    """The last calls of a capacity, in every mode, after a text that the port has read in fp32."""

    def __init__(self, port: Port, weights: int, capacity: int) -> None:
        plain = port.computing("fp32")
        self.port, self.planner = port, port.planner
        self.plan = plain.plan.at(capacity)
        self.capacity = capacity if plain.plan.smaller else None
        exact = self._on(plain)
        calls = [(mode, whole_parts(self.plan, mode, capacity)) for mode in self.plan.modes]
        last = max(sum(part.tokens for part in made) for _, made in calls)
        prefix = max(min(capacity - last, WORK // weights), 1)
        ids = begun(port.tokenizer, prefix + last)
        self.before = exact.session()
        exact.run([(self.before, self.before.prepare(ids[:prefix], "none"))])
        self.tasks = [
            ProbeTask(mode, Probe(mode, ids[prefix:][: sum(part.tokens for part in made)]), made)
            for mode, made in calls
        ]
        self.taken = TakenExperts.of(self.planner)
        self.exact = observe(exact, self.planner, self.tasks, self.before, [self.taken.note])

    def _on(self, engine: Engine) -> Engine:
        return Engine(self.plan, engine.backend, engine.tables, resident=False)

    def loss(self, seek: Seek = lambda *_: None) -> list[Rounding]:
        """The loss of an ANE's arithmetic against fp32, by mode. `seek` gets its results."""
        engine = self._on(self.port.computing("ane", self.taken))
        seen = observe(engine, self.planner, self.tasks, self.before)
        seek(self.tasks, seen, self.before)
        places = made_by(self.planner, self.plan)
        return [
            measure_rounding(
                task, exact, made, places, self.plan, self.before.position, capacity=self.capacity
            )
            for task, exact, made in zip(self.tasks, self.exact, seen, strict=True)
        ]


def measure_rounding(
    task: ProbeTask,
    exact: Seen,
    rounded: Seen,
    places: dict[Truth, tuple[str, str]],
    plan: Plan,
    before: int = 0,
    decided: Array | None = None,
    capacity: int | None = None,
    text: bool = False,
) -> Rounding:
    """The loss of one mode by rounding, after `before` tokens. `places` is from `made_by`.

    `decided (n,)` says for which tokens with logits the model is sure of its choice, bool."""
    share, kept = same_experts(exact.choices, rounded.choices, len(task.probe.tokens))
    cosines, where = [], ""
    lost = len(task.probe.tokens)  # the first token with infinity or NaN
    for truth, (at, rows) in rounded.tensors.items():
        cosines.append(float(metrics.cosine(rows, exact.tensors[truth][1])[kept[at]].mean()))
        bad = at[~np.isfinite(rows).all(1)]
        where = where or (places[truth][0] if bad.size else "")
        lost = min([lost, *bad])
    tokens = plan.tokens(0, plan.rows)
    a, b = rounded.logits[:, tokens], exact.logits[:, tokens]
    lost = min([lost, *rounded.at[~np.isfinite(a).all(1)]])
    finite = lost == len(task.probe.tokens)
    chooses = bool(plan.recipe.head.choose)
    others = 0 if decided is None else int((decided & (a.argmax(1) != b.argmax(1))).sum())
    a, b = a[kept[rounded.at]], b[kept[rounded.at]]
    if chooses:  # one logit of each token is known: together they are one row
        a, b = a.max(1)[None], b.max(1)[None]
    kl = 0.0 if chooses else metrics.written(metrics.divergence(a, b).mean())
    return Rounding(
        mode=next((mode for mode, at in rounded.by_mode.items() if lost in at), task.mode),
        positions=len(task.probe.tokens),
        keys=before + len(task.probe.tokens),
        hidden_cosine=min(cosines, default=1.0),
        logit_cosine=float(metrics.cosine(a, b).mean()),
        kl=kl,
        finite=finite,
        other_experts=share,
        other_far=other_far(exact.choices, rounded.choices),
        chooses=chooses,
        other_choices=others if chooses else 0,
        capacity=capacity,
        where=where or ("" if finite else plan.shards[-1].name),
        text=text,
    )


def together(windows: Sequence[Rounding]) -> Rounding:
    """The loss over several windows of text, each with its number of tokens as a weight."""
    tokens = [one.positions for one in windows]
    means = {
        name: float(np.average([getattr(one, name) for one in windows], weights=tokens))
        for name in ("hidden_cosine", "logit_cosine", "kl", "other_experts", "other_far")
        if getattr(windows[0], name) is not None
    }
    sums = {"positions": sum(tokens), "other_choices": sum(one.other_choices for one in windows)}
    first = next((one for one in windows if not one.finite), windows[0])
    return first.model_copy(update=means | sums)


def same_experts(exact: Choices, rounded: Choices, count: int) -> tuple[float | None, Array]:
    """The share of the choices of experts that rounding changed, None without experts; and which of
    `count` tokens have the same experts in all layers, bool `(count,)`: all, if none has."""
    same, changed = np.ones(count, bool), list[Array]()
    for layer in exact.keys() & rounded.keys():
        at, experts, _ = exact[layer]
        others = (experts != rounded[layer].experts).any(1)
        same[at] &= ~others
        changed.append(others)
    share = float(np.concatenate(changed).mean()) if changed else None
    return share, same if same.any() else np.ones(count, bool)


def other_far(exact: Choices, rounded: Choices) -> float | None:
    """The share of the chosen experts below which rounding made others far; None without any."""
    changed = [
        (one.far != other.far).any(-1).ravel()
        for layer in exact.keys() & rounded.keys()
        if (one := exact[layer]).far is not None and (other := rounded[layer]).far is not None
    ]
    return float(np.concatenate(changed).mean()) if changed else None


def judge_rounding(
    arithmetic: Literal["fp16", "ane"], roundings: Sequence[Rounding]
) -> Iterator[Check]:
    """The checks of what an arithmetic costs, whatever the recipe compresses.

    - On a text, and in an ANE's arithmetic, predictions are judged, if the head gives logits. A few
      tokens of many have hidden states that any rounding moves, but hardly the predictions.
      Attention without its factor moves the predictions most.
    - Near a tie of experts, either choice is right. So of the choices only the share of others is
      judged, and that of far experts, which the rounded run takes from fp32 too.
    """
    limit = limits().fp16 if arithmetic == "fp16" else limits().ane
    for one in roundings:
        start, mode = f"{arithmetic}:", one.told
        yield at_most(f"{start} infinity or NaN {mode}", float(not one.finite), 0)
        if one.other_experts is not None:
            name = f"{start} other experts {mode}"
            yield at_most(name, one.other_experts, limit.other_experts)
        if one.other_far is not None:
            yield at_most(f"{start} other far experts {mode}", one.other_far, limit.other_experts)
        if one.chooses or (arithmetic == "fp16" and not one.text):
            yield at_least(f"{start} hidden cosine {mode}", one.hidden_cosine, limit.hidden_cosine)
        if one.chooses or not one.text:
            yield at_least(f"{start} logit cosine {mode}", one.logit_cosine, limit.logit_cosine)
        if one.chooses and arithmetic == "fp16" and not one.text:  # a text has more near ties
            name = f"{start} other choices {mode}"
            yield at_most(name, one.other_choices, limits().fp16.other_choices)
        if not one.chooses:
            most = limits().fp16.text_kl if one.text else limit.kl
            yield at_most(f"{start} KL {mode}", one.kl, most)


def same_scales(port: Port) -> Check:
    """Whether the functions of each shard round each activation to 8 bits by one scale.

    The promise judges the widest mode alone. The other modes keep it if they round as it does.
    """
    others = 0
    for shard in port.plan.by_name:
        first: dict[str, Any] = {}
        for own in port.scales(shard).values():
            others += sum(first.setdefault(name, scale) != scale for name, scale in own.items())
    return at_most(f"{QUANTIZED}scales that differ between functions", float(others), 0)


def judge_quantized(roundings: Sequence[Rounding]) -> Iterator[Check]:
    """The checks of activations of 8 bits in every mode: each is a function of its own, with its
    own scales. The promise judges the widest mode."""
    least = limits().activations.cosine
    for one in roundings:
        yield at_least(f"{QUANTIZED}hidden cosine {one.told}", one.hidden_cosine, least)
        yield at_least(f"{QUANTIZED}logit cosine {one.told}", one.logit_cosine, least)
