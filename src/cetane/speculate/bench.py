"""The benchmark of speculation: the speed with drafts, by category of prompt and by drafter."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median

from cetane.engine.engine import Engine
from cetane.engine.generate import generate
from cetane.engine.sampling import Sampler
from cetane.files import Progress
from cetane.speculate.controller import Controller
from cetane.speculate.drafter import Drafter, watches
from cetane.speculate.speculator import Counters, Speculator
from cetane.validation import Data

Ids = Sequence[int]


class Speed(Data):
    """The speed of one drafter on the prompts of one category.

    There is none where every answer ends with its first token: then figures are None.
    """

    category: str
    drafter: str
    prompts: int
    tokens: int
    """Tokens after the first of every answer."""
    plain: float | None = None
    """Tokens per second of greedy decoding without drafts: medians of the rounds."""
    speculative: float | None = None
    """The same with drafts. The time counts too in which the drafter reads the prompts."""
    ratio: float | None = None
    """`speculative` / `plain`."""
    slowest: float | None = None
    """The smallest ratio of any prompt."""
    by_calls: float | None = None
    """The ratio computed from the number of calls, the time of one call of each width, and the
    drafter's own time. Other work on the machine hardly changes it."""
    first_plain: float
    """Mean seconds to the first token."""
    first_speculative: float
    reading: float
    """Mean seconds in which the drafter reads a prompt, before the first token."""
    acceptance: float | None
    tokens_per_call: float | None
    verifier_calls: int
    fallbacks: int
    same: bool
    """Whether all tokens equal those of plain decoding."""


@dataclass(frozen=True)
class Generation:
    """The tokens of one greedy answer, and their time."""

    tokens: list[int]
    seconds: float
    """Seconds after the first token."""
    first: float
    """Seconds to the first token."""
    reading: float
    """Seconds in which the drafters read the prompt."""


@dataclass(frozen=True)
class Trial:
    """How prompts are answered greedily: the same way with drafts and without."""

    engine: Engine
    count: int
    """The most tokens of an answer."""
    stop: Ids = ()
    """The tokens that end an answer."""
    adapter: str | None = None
    """The adapter of all answers; None for the base."""
    whole: bool = False
    """As in `Engine.session`."""

    def take(self, prompt: Ids, speculator: Speculator | None = None) -> Generation:
        """Answer a prompt, and measure the time to the first token and after it."""
        tokens, marks = [], []
        counters = Counters() if speculator is None else speculator.counters
        read = counters.read_seconds
        watch = watches(self.engine.plan, [] if speculator is None else speculator.drafters)
        session = self.engine.session(watch=watch, whole=self.whole, adapter=self.adapter)
        started = time.perf_counter()
        for token in generate(session, prompt, Sampler(), self.count, self.stop, speculator):
            tokens.append(token)
            marks.append(time.perf_counter())
        ended = time.perf_counter()
        first = marks[0] if marks else ended
        return Generation(tokens, ended - first, first - started, counters.read_seconds - read)


def compare(
    trial: Trial,
    prompts: Mapping[str, Sequence[Ids]],
    drafters: dict[str, Callable[[], list[Drafter]]],
    costs: Mapping[int, Sequence[float]],
    longest: int,
    rounds: int,
    progress: Progress,
) -> list[Speed]:
    """Run every prompt, plain and with each drafter, in every round.

    Each round has new drafters and controllers, which learn from prompt to prompt. So a suffix trie
    knows the answers to other prompts, but never the answer to this one. If a draft head is among
    the drafters, all sessions run all layers: other cuts of a prompt may round differently.
    """
    plain: dict[tuple[str, int], list[Generation]] = {}
    takes: dict[tuple[str, str, int], list[Generation]] = {}
    counters: dict[tuple[str, str], Counters] = {}
    work = [(category, i) for category, group in prompts.items() for i in range(len(group))]
    category, index = work[0]
    replace(trial, count=8, stop=()).take(prompts[category][index])  # warms up
    for round_ in range(rounds):
        used = {
            name: Speculator(make(), longest, Controller(costs)) for name, make in drafters.items()
        }
        whole = any(watches(trial.engine.plan, one.drafters) for one in used.values())
        trial = replace(trial, whole=whole)
        for done, (category, index) in enumerate(work):
            progress(category, round_ * len(work) + done, rounds * len(work))
            prompt = prompts[category][index]
            plain.setdefault((category, index), []).append(trial.take(prompt))
            for name, speculator in used.items():
                speculator.counters = counters.setdefault((category, name), Counters())
                drafted = trial.take(prompt, speculator)
                takes.setdefault((category, name, index), []).append(drafted)
        for speculator in used.values():
            speculator.close()
    return [
        summary(
            category,
            name,
            [plain[category, i] for i in range(len(prompts[category]))],
            [takes[category, name, i] for i in range(len(prompts[category]))],
            counters[category, name],
            costs,
        )
        for category in prompts
        for name in drafters
    ]


def summary(
    category: str,
    drafter: str,
    plain: Sequence[Sequence[Generation]],
    drafted: Sequence[Sequence[Generation]],
    counters: Counters,
    costs: Mapping[int, Sequence[float]],
) -> Speed:
    """The speed on all prompts together, from the median time of each prompt's rounds.

    What a drafter needs to read the prompts counts as its own clock measures it. The difference of
    the times to the first token would hide it: feeding a long prompt varies by more. An answer that
    ends with its first token has no speed.
    """
    timed = [i for i, rounds in enumerate(plain) if len(rounds[0].tokens) > 1]
    tokens = sum(len(plain[i][0].tokens) - 1 for i in timed)
    seconds = [median(taken.seconds for taken in plain[i]) for i in timed]
    others = [median(taken.seconds + taken.reading for taken in drafted[i]) for i in timed]
    counted = counters.summary()
    figures = (
        {
            "plain": tokens / sum(seconds),
            "speculative": tokens / sum(others),
            "ratio": sum(seconds) / sum(others),
            "slowest": min(one / other for one, other in zip(seconds, others, strict=True)),
            "by_calls": ratio_by_calls(counters, Controller(costs)),
        }
        if timed
        else {}
    )
    begun = timed or range(len(plain))
    return Speed(
        category=category,
        drafter=drafter,
        prompts=len(timed),
        tokens=tokens,
        **figures,
        first_plain=mean(median(taken.first for taken in plain[i]) for i in begun),
        first_speculative=mean(median(taken.first for taken in drafted[i]) for i in begun),
        reading=mean(median(taken.reading for taken in drafted[i]) for i in begun),
        acceptance=counted["acceptance"],
        tokens_per_call=counted["tokens_per_call"],
        verifier_calls=counters.verifier_calls,
        fallbacks=counters.fallbacks,
        same=all(
            taken.tokens == rounds[0].tokens
            for rounds, group in zip(plain, drafted, strict=True)
            for taken in group
        ),
    )


def ratio_by_calls(counters: Counters, controller: Controller) -> float:
    """`Speed.by_calls`, from the usual time of each call."""
    seconds = counters.fallbacks * controller.plain_step
    for size, count in counters.calls.items():
        seconds += count * controller.seconds(controller.narrowest[size])
    seconds += counters.draft_seconds + counters.read_seconds
    return counters.tokens * controller.plain_step / seconds if seconds else 1.0
