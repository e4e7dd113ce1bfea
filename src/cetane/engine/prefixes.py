"""Prefixes: sessions that keep the starts of earlier prompts, so that these run only once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cetane.engine.backend import Array
from cetane.engine.engine import Engine
from cetane.engine.execution import Watch
from cetane.engine.memory import Mark
from cetane.engine.schedule import Schedule
from cetane.engine.session import Session, token_ids
from cetane.schema.recipe import Mode

SESSIONS = 4
"""Sessions that are kept, each with caches for a whole context."""
MARKS = 8
"""Marks that a session keeps. For some cache contracts each holds a copy of the caches."""

LogitsWatch = Callable[[int, Array], None]
"""Called with the position of a call's first token, and the call's logits `(n, V)`."""


def common_start(one: Sequence[object], other: Sequence[object]) -> int:
    """How many first items of two sequences are equal."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


class PromptCall(NamedTuple):
    """A call for tokens of a prompt, which end before the position `end`."""

    mode: Mode
    tokens: tuple[int, ...]
    end: int
    adapter: str | None = None
    """Calls with different adapters are never shared."""


@dataclass
class KnownPrompt:
    """A session, and the calls of its prompt that have run."""

    session: Session
    calls: list[PromptCall] = field(default_factory=list)
    marks: dict[int, Mark] = field(default_factory=dict)
    """The memory after the first n calls, by n."""
    logits: Array | None = None
    """The logits `(V,)` after the last call, if it was the last of its prompt."""

    def shared(self, calls: Sequence[PromptCall], logits: bool) -> int:
        """The number of the first `calls` that need not run again.

        With `logits`, the last of the calls runs again unless its logits were kept.
        """
        same = common_start(self.calls, calls)
        kept = self.logits is not None and len(self.calls) == len(calls)
        if logits and same == len(calls) and not kept:
            same -= 1
        return max((n for n in self.marks if n <= same), default=0)

    def continues(self, calls: Sequence[PromptCall]) -> bool:
        """Whether a prompt of `calls` begins with the whole prompt of this session."""
        own = [token for call in self.calls for token in call.tokens]
        return [token for call in calls for token in call.tokens][: len(own)] == own

    def return_to(self, count: int) -> None:
        """Forget all calls but the first `count`."""
        if count < len(self.calls):
            self.logits = None
        self.session.rewind(self.marks[count])
        del self.calls[count:]
        self.marks = {n: mark for n, mark in self.marks.items() if n <= count}

    def add(self, call: PromptCall) -> None:
        """Count a call that has run. Of too many marks, every second one is dropped."""
        self.calls.append(call)
        if len(self.marks) == MARKS:
            self.marks = dict([*self.marks.items()][1::2])
        self.marks[len(self.calls)] = self.session.mark()


class Fed(NamedTuple):
    """A session that holds a prompt."""

    session: Session
    logits: Array
    """The logits after the prompt, `(V,)`."""
    cached: int
    """The number of its tokens that were not computed again."""


class Prefixes:
    """Feeds prompts, and computes a known start only once.

    Calls of different widths round differently. So a prompt takes from an earlier one only whole
    calls that it would make itself: its answer is the same, bit for bit, as without this cache. An
    answer's own tokens are computed again as part of the next prompt.
    """

    def __init__(self, engine: Engine, most: int = SESSIONS, whole: bool = False) -> None:
        """`most`: the number of sessions that are kept; `whole` as in `Engine.session`."""
        plan = engine.plan
        self.engine, self.whole, self.schedule = engine, whole, Schedule(plan, whole=whole)
        self.most = 0 if plan.forgets else most
        """A state of a window takes no marks, so its sessions are not kept."""
        self.known: list[KnownPrompt] = []
        """The most recently used session is the last."""

    def feed(
        self,
        tokens: Sequence[int],
        rows: LogitsWatch | None = None,
        start: int = 0,
        check: Callable[[], None] = lambda: None,
        adapter: str | None = None,
        watch: Sequence[Watch] = (),
    ) -> Fed:
        """Feed a prompt to a session, with an adapter or without.

        `rows` receives the logits of all tokens from position `start` on, and perhaps of some
        before. `check` is called before every call; what it raises ends the feed. `watch` is called
        with all outputs of the session's calls from now on. Raises CetaneError as `Session.feed`.
        """
        calls = self.planned(tokens, rows is not None, adapter)
        unscored = [call for call in calls if rows is None or call.end <= start]
        known, shared = self.open(unscored, logits=len(unscored) == len(calls))
        known.session.adapter, known.session.execution.watch = adapter, tuple(watch)
        for number, call in enumerate(calls[shared:], shared):
            check()
            scored, last = number >= len(unscored), number == len(calls) - 1
            known.logits = None  # they are an earlier call's, and `check` may end this prompt
            try:
                made = known.session.feed(
                    call.tokens, "all" if scored else "last" if last else "none"
                )
            except BaseException:
                self.known = [other for other in self.known if other is not known]
                raise
            if made is not None and scored and rows is not None:
                rows(call.end - len(call.tokens), made)
            if made is not None and last:
                known.logits = made[-1].copy() if scored else made
            if self.most:
                known.add(call)
        assert known.logits is not None
        return Fed(known.session, known.logits, calls[shared - 1].end if shared else 0)

    def planned(
        self, tokens: Sequence[int], scored: bool, adapter: str | None = None
    ) -> list[PromptCall]:
        """The calls of a prompt; `scored`: for the logits of all tokens. Raises CetaneError as
        `feed`."""
        ids = token_ids(tokens, self.engine.plan.vocab)
        calls: list[PromptCall] = []
        end = 0
        for call in self.schedule.cut(0, len(ids), "all" if scored else "last"):
            taken = tuple(ids[end : end + call.count])
            end += call.count
            calls.append(PromptCall(call.mode, taken, end, adapter))
        return calls

    def open(self, calls: Sequence[PromptCall], logits: bool) -> tuple[KnownPrompt, int]:
        """A session for a prompt, and the number of its `calls` that it holds already.

        A prompt that continues a session's prompt takes the session over. Any other prompt gets a
        copy of the calls that it shares, so that two conversations do not drive each other out.
        """
        best = max(self.known, key=lambda known: known.shared(calls, logits), default=None)
        shared = 0 if best is None else best.shared(calls, logits)
        if best is None or not shared:
            self.make_room(None)
            known = KnownPrompt(self.engine.session(whole=self.whole))
        elif best.continues(calls) or not self.engine.plan.copies or self.most == 1:
            best.return_to(shared)
            self.known.remove(best)
            known = best
        else:
            self.make_room(best)
            known = KnownPrompt(self.engine.session(whole=self.whole), best.calls[:shared])
            known.session.rewind(best.marks[shared].copied())
            known.marks = {shared: known.session.mark()}
            known.logits = best.logits if shared == len(best.calls) else None
        if self.most:
            self.known.append(known)
        return known, shared

    def make_room(self, spared: KnownPrompt | None) -> None:
        """Drop the session that was not used for the longest time, if there are too many."""
        if len(self.known) >= self.most > 0:
            self.known.remove(next(known for known in self.known if known is not spared))
