"""The probes of a kit: calls with known tokens, and the logits that cetane's executor expects.

The golden gate compared that executor's arithmetic with the Hugging Face model. So a kit compares a
Mac only with the executor.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cetane.bundle import Bundle
from cetane.checkpoint import Tokenizer
from cetane.engine.backend import Array
from cetane.engine.call import Running
from cetane.engine.engine import Engine
from cetane.engine.portable import PortableBackend
from cetane.engine.schedule import Schedule, ScheduledCall, Wanted
from cetane.gates.probes import WORK, text_tokens, widest_tokens
from cetane.gates.reference import RESIDENT
from cetane.schema.plan import Plan
from cetane.schema.recipe import Mode
from cetane.validation import Data

SHORTEST, STEPS = 16, 12
"""Tokens of the shortest prompt, and decoded tokens after it."""
MOST_CALLS = 1000
"""The most calls of full width before the late ones: at half a second each, they take less than the
script's time limit for a probe."""


class ProbeCall(Data):
    """One call of a probe."""

    mode: Mode
    tokens: tuple[int, ...]
    logits: bool


class KitProbe(Data):
    """Calls, one after the other, from the start of a sequence.

    With `every`, every token's logits are judged, else those of each call's last token. `prompt`
    is the number of calls before those of the last part.
    """

    name: str
    adapter: str | None = None
    calls: tuple[ProbeCall, ...]
    every: bool
    prompt: int

    @property
    def judged(self) -> int:
        """The number of positions whose logits are judged."""
        return sum(len(call.tokens) if self.every else 1 for call in self.calls if call.logits)


@dataclass(frozen=True)
class ExpectedProbe:
    """A probe, and its judged positions' logits, fp32 `(n, V)`."""

    probe: KitProbe
    logits: Array


@dataclass(frozen=True)
class KitPart:
    """Tokens of a probe, those whose logits are wanted, and the modes that take them."""

    tokens: Sequence[int]
    wanted: Wanted
    modes: Collection[Mode]


@dataclass(frozen=True)
class ProbeOutline:
    """The parts of a probe, one after the other, before anything runs."""

    name: str
    parts: Sequence[KitPart]
    every: bool = False
    adapter: str | None = None

    def probe(self, plan: Plan) -> KitProbe:
        """The calls into which a plan's schedule cuts the parts."""
        calls: list[ProbeCall] = []
        prompt = position = 0
        for part in self.parts:
            prompt, count = len(calls), len(part.tokens)
            cut = Schedule(plan, part.modes).cut(position, count, part.wanted)
            calls += with_tokens(cut, part.tokens)
            position += count
        return KitProbe(
            name=self.name,
            adapter=self.adapter,
            calls=tuple(calls),
            every=self.every,
            prompt=prompt,
        )


def largest_plan(bundle: Bundle) -> Plan:
    """A bundle's plan with only the largest of its capacities, which probes use."""
    return bundle.plan.at(bundle.plan.recipe.cache.context)


def judged_positions(bundle: Bundle) -> dict[str, int]:
    """The number of positions that every probe of a bundle judges. Runs nothing."""
    plan = largest_plan(bundle)
    return {one.name: one.probe(plan).judged for one in outlines(plan, bundle.tokenizer)}


def expected_probes(bundle: Bundle) -> list[ExpectedProbe]:
    """The probes of a bundle, with the logits that it should give."""
    plan = largest_plan(bundle)
    backend = PortableBackend(bundle, "fp32")
    resident = plan.weight_bytes <= RESIDENT
    engine = Engine(plan, backend, bundle.tables(), resident=resident)
    return [run(engine, one) for one in outlines(plan, bundle.tokenizer)]


def outlines(plan: Plan, tokenizer: Tokenizer) -> list[ProbeOutline]:
    """The probes of a plan. They are the same for the same bundle.

    - `text`: a prompt, then decoded text; the same with every adapter, as `text-NAME`.
    - `verify`: verifying calls, if it has any.
    - `late`: such calls and decoded text at the end of the context, where attention has the most
      keys, and windows are in use again. The text before them is silent.
    """
    context, widest = plan.recipe.cache.context, widest_tokens(plan)
    width = plan.modes["verify"].tokens if "verify" in plan.modes else 0
    text = text_tokens(tokenizer, context)
    reading = plan.plain_modes
    prompt = min(max(SHORTEST, 2 * widest + widest // 2), context // 2)
    parts = [KitPart(text[:prompt], "last", reading),
             KitPart(text[prompt : prompt + STEPS], "all", ["decode"])]  # fmt: skip
    probes = [ProbeOutline("text", parts)]
    probes += [ProbeOutline(f"text-{name}", parts, adapter=name) for name in plan.adapters]
    if width and 2 * width <= context:
        verifying = [KitPart(text[: 2 * width], "all", ["verify"])]
        probes.append(ProbeOutline("verify", verifying, every=True))
    before = min(context - width - STEPS, most_tokens(plan))
    if before > prompt:
        # Near the end of a window's state there may be no room for a verifying call.
        verified = before + (width if width <= Schedule(plan).room(before) else 0)
        late = [
            KitPart(text[:before], "none", reading),
            KitPart(text[before:verified], "all", ["verify"]),
            KitPart(text[verified : before + width + STEPS], "all", ["decode"]),
        ]
        probes.append(ProbeOutline("late", [part for part in late if part.tokens], every=True))
    return probes


def most_tokens(plan: Plan) -> int:
    """The most tokens before the late calls: their time has a limit here and on the Mac."""
    weights = 8 * plan.weight_bytes / max(plan.mean_bits, 1)
    return min(int(WORK // weights), MOST_CALLS * widest_tokens(plan))


def run(engine: Engine, outline: ProbeOutline) -> ExpectedProbe:
    """Run a probe."""
    session = engine.session(adapter=outline.adapter)
    calls: list[Running] = []
    for part in outline.parts:
        calls += session.prepare(part.tokens, part.wanted, part.modes)
    engine.run([(session, calls)], last=True)
    judged = [rows if outline.every else rows[-1:] for rows in logits_of(calls)]
    return ExpectedProbe(outline.probe(engine.plan), np.concatenate(judged))


def with_tokens(cut: Sequence[ScheduledCall], tokens: Sequence[int]) -> list[ProbeCall]:
    """Scheduled calls with their tokens."""
    calls, start = [], 0
    for one in cut:
        taken = tuple(int(token) for token in tokens[start : start + one.count])
        calls.append(ProbeCall(mode=one.mode, tokens=taken, logits=one.logits))
        start += one.count
    return calls


def logits_of(calls: Sequence[Running]) -> Iterator[Array]:
    """The logits `(n, V)` of every call that has some, after it ran."""
    for call in calls:
        if call.logits is not None and call.logits.rows is not None:
            yield call.logits.rows
