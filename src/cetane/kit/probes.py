"""The probes of a kit: calls with known tokens, and the logits that cetane's executor expects.

The golden gate compared that executor's arithmetic with the Hugging Face model. So a kit compares a
Mac only with the executor.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cetane.bundle import Bundle
from cetane.checkpoint import Tokenizer
from cetane.engine.backend import Array, Arrays, Backend, OpenShard
from cetane.engine.call import Running
from cetane.engine.engine import Engine
from cetane.engine.portable import PortableBackend
from cetane.engine.schedule import Schedule, ScheduledCall, Wanted
from cetane.gates.probes import WORK, text_tokens, widest_tokens
from cetane.gates.reference import RESIDENT
from cetane.schema.interface import FromCache, FromHistory, FromMatrix
from cetane.schema.plan import Plan
from cetane.schema.recipe import Mode
from cetane.validation import Data

SHORTEST, STEPS = 16, 12
"""Tokens of the shortest prompt, and decoded tokens after it."""
MOST_CALLS = 1000
"""The most calls of full width before the late ones: at half a second each, they take less than the
script's time limit for a probe."""
LARGEST_OUTPUT = 1 << 20
"""Elements of the largest output of a function that is kept for comparison."""


class ProbeCall(Data):
    """One call of a probe."""

    mode: Mode
    tokens: tuple[int, ...]
    logits: bool


class KitProbe(Data):
    """Calls, one after the other, from the start of a sequence.

    With `every`, every token's logits are judged, else those of each call's last token. `prompt`
    are the calls before those of the last part.
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


@dataclass
class ExampleCall:
    """The first call of a function. Caches, histories and matrices are empty in it."""

    inputs: Arrays
    """All inputs that are not empty."""
    outputs: Arrays
    zeros: dict[str, tuple[int, ...]]
    """The shapes of the empty inputs, by name."""


class ExampleRecorder:
    """A backend that keeps the first call of every function. Inputs are rounded to fp16 first, as
    Core ML gets them."""

    name, dtype, by_rows = "recorder", np.float32, False

    def __init__(self, backend: Backend, plan: Plan) -> None:
        self.backend, self.plan = backend, plan
        self.calls: dict[tuple[str, str], ExampleCall] = {}

    def open(self, shard: str) -> OpenShard:
        return RecordedShard(self, shard, self.backend.open(shard))


class RecordedShard:
    """A shard whose calls the recorder sees."""

    def __init__(self, recorder: ExampleRecorder, name: str, shard: OpenShard) -> None:
        self.recorder, self.name, self.shard = recorder, name, shard

    def make_state(self, function: str) -> object:
        return self.shard.make_state(function)

    def call(self, function: str, inputs: Arrays, state: object) -> Arrays:
        halves = {name: half(value) for name, value in inputs.items()}
        outputs = self.shard.call(function, {n: wide(v) for n, v in halves.items()}, state)
        if (self.name, function) not in self.recorder.calls:
            described = self.recorder.plan.functions[self.name, function]
            empty = {
                item.name: item.shape
                for item in described.inputs
                if isinstance(item.source, FromCache | FromHistory | FromMatrix)
            }
            self.recorder.calls[self.name, function] = ExampleCall(
                {name: value for name, value in halves.items() if name not in empty},
                {n: half(v) for n, v in outputs.items() if v.size <= LARGEST_OUTPUT},
                empty,
            )
        return outputs


def half(value: Array) -> Array:
    """An array as Core ML gets it: int8, fp16 or int32."""
    if value.dtype == np.int8:
        return value
    return value.astype(np.float16) if value.dtype.kind == "f" else value.astype(np.int32)


def wide(value: Array) -> Array:
    return value.astype(np.float32) if value.dtype.kind == "f" else value


def function_calls(bundle: Bundle) -> dict[tuple[str, str], ExampleCall]:
    """The first call of every function, at the start of a sequence, where all caches are empty: in
    every mode, with every adapter and without.

    No call reaches some functions, such as an expert that no token chose. Such a function gets the
    inputs of another one with the same signature, and no expected outputs. Without such a twin, it
    is left out.
    """
    plan = bundle.plan
    recorder = ExampleRecorder(PortableBackend(bundle, "fp32"), plan)
    resident = plan.weight_bytes <= RESIDENT
    for capacity in plan.capacities:
        engine = Engine(plan.at(capacity.tokens), recorder, bundle.tables(), resident=resident)
        for adapter in (None, *capacity.adapters):
            for mode, described in capacity.modes.items():
                tokens = text_tokens(bundle.tokenizer, described.tokens)
                for wanted in ("all", "none"):
                    feed(engine, mode, tokens, wanted, adapter)
    signatures = {signature(plan, key): call for key, call in recorder.calls.items()}
    for key in plan.functions:
        twin = signatures.get(signature(plan, key))
        if key not in recorder.calls and twin is not None:
            recorder.calls[key] = ExampleCall(twin.inputs, {}, twin.zeros)
    return recorder.calls


def feed(
    engine: Engine, mode: Mode, tokens: Sequence[int], wanted: Wanted, adapter: str | None
) -> None:
    """One call of a mode, on a new sequence."""
    session = engine.session([mode], adapter=adapter)
    engine.run([(session, session.prepare(tokens, wanted))], last=True)


def signature(plan: Plan, key: tuple[str, str]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The names and shapes of a function's inputs."""
    return tuple((item.name, item.shape) for item in plan.functions[key].inputs)
