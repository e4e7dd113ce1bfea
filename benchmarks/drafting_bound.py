"""What drafts gain over a bundle's greedy answers, and could gain at most, with calls of given
cost.

The model answers the speculative suite once. Then drafts are replayed on these answers: as the
controller decides, and as one who knows the answer would. That one verifies a draft exactly where
it pays. No time is measured: calls cost what `--calls` says, in plain steps, by their width.
Look-ups cost nothing. With `--head` the bundle's EAGLE-3 draft head drafts too. Each of its tokens
costs what is given, but nothing to one who knows the answer.

    python benchmarks/drafting_bound.py BUNDLE --calls 4:1.05 4:1.33 4:1.33,8:1.6
    python benchmarks/drafting_bound.py BUNDLE --calls 2:1.15,3:1.2,4:1.21,8:1.66 --head 0.17:0.11
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

from cetane.bundle import Bundle
from cetane.engine.backend import Array
from cetane.engine.engine import Engine
from cetane.engine.generate import generate
from cetane.engine.open import open_engine
from cetane.engine.sampling import Sampler
from cetane.engine.session import Session
from cetane.engine.verify import NO_DRAFT, Draft
from cetane.gates.probes import asked
from cetane.prompts import suite
from cetane.speculate.controller import Controller
from cetane.speculate.draft_heads.drafter import Eagle3Drafter
from cetane.speculate.drafter import Drafter, DraftTimes, open_session
from cetane.speculate.network import NetworkDrafter
from cetane.speculate.ngram import Ngram
from cetane.speculate.open import DrafterOptions, open_drafters
from cetane.speculate.speculator import Speculator
from cetane.speculate.suffix import EarlierAnswers, Suffix
from common import arguments, report


@dataclass
class Answered:
    """A prompt, its answer, and what a draft head says after each token of the answer: logits
    `(R,)` for each of the next tokens."""

    prompt: Sequence[int]
    answer: list[int]
    said: list[list[Array]]


@dataclass
class TakesDown:
    """A source that drafts nothing, and takes down what a draft head says after each token."""

    head: Drafter
    said: list[list[Array]] = field(default_factory=list)

    def begin(self, session: Session, tokens: Sequence[int], stop: Sequence[int] = ()) -> None:
        self.head.begin(session, tokens)

    def read(self) -> None:
        self.head.read()

    def draft(self, new: Sequence[int], most: int) -> Draft:
        self.head.extend(new)
        with patch.object(self.head, "likely", self.take):
            return self.head.propose(most)

    def take(self, rows: Iterable[Array], most: int) -> Draft:
        self.said.append([row.copy() for row in rows])
        return NO_DRAFT

    def settle(self, draft: Draft, new: Sequence[int], seconds: float) -> None:
        pass

    def end(self, new: Sequence[int]) -> None:
        self.head.end()


class Known(EarlierAnswers):
    """Answers that are inserted at once, so that two replays are the same."""

    def add(self, adapter: str | None, tokens: Sequence[int]) -> None:
        self.tries[adapter] = self.trie(adapter).insert(tokens)


@dataclass
class Clock:
    """The time of a replay, in plain steps."""

    now: float = 0.0

    def perf_counter(self) -> float:
        return self.now


class Replayed(NetworkDrafter):
    """Drafts from what a draft head said, at a given cost of its first and of each later token."""

    name = Eagle3Drafter.name

    def __init__(self, vocabulary: Array, first: float, later: float) -> None:
        super().__init__()
        self.vocabulary, self.first, self.later = vocabulary, first, later
        self.clock = Clock()

    @property
    def times(self) -> DraftTimes:
        return DraftTimes(self.first - self.later, self.later)

    def follow(self, answered: Answered) -> None:
        """Take over what the head said in this answer."""
        self.said, self.before = answered.said, len(answered.prompt) + 1

    def propose(self, most: int) -> Draft:
        return self.likely(self.heard(), most)

    def heard(self) -> Iterator[Array]:
        for number, row in enumerate(self.said[len(self.tokens) - self.before]):
            self.clock.now += self.later if number else self.first
            yield row


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--calls", nargs="+", required=True, help="4:1.33,8:1.6 and so on")
    parser.add_argument("--head", help="the cost of a draft's first and later tokens, as 0.17:0.11")
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of an answer")
    options = parser.parse_args()
    bundle = Bundle(Path(options.model))
    engine, real, head = open_engine(bundle), None, None
    if options.head:
        (real,) = open_drafters(
            DrafterOptions(Eagle3Drafter.name), bundle, Sampler(), "auto", remember=False
        )
        assert isinstance(real, Eagle3Drafter)
        head = Replayed(real.vocabulary, *map(float, options.head.split(":")))
    answered = {}
    for category, texts in suite().items():
        answered[category] = [answer(engine, bundle, text, options.tokens, real) for text in texts]
    rows = []
    for given in options.calls:
        pairs = (pair.split(":") for pair in given.split(","))
        costs = {1: 1.0, **{int(width): float(steps) for width, steps in pairs}}
        decided, best = (
            replay(engine, answered, costs, knowing, head) for knowing in (False, True)
        )
        rows += [[given, name, *decided[name], best[name][0]] for name in answered]
    columns = ["calls", "prompts", "by the controller", "its slowest", "at best"]
    report("bound of drafting", columns, rows, {"rows": rows}, options.json)


def answer(engine: Engine, bundle: Bundle, text: str, count: int, head: Drafter | None) -> Answered:
    """The greedy answer to a prompt, with what a draft head says to it."""
    heads = [] if head is None else [head]
    source = TakesDown(head) if head else None
    prompt = asked(bundle.tokenizer, text)
    tokens = generate(
        open_session(engine, heads), prompt, Sampler(), count, bundle.tokenizer.eos_ids, source
    )
    return Answered(prompt, list(tokens), source.said if source else [])


def replay(
    engine: Engine, answered: Mapping[str, Sequence[Answered]], costs: Mapping[int, float],
    knowing: bool, head: Replayed | None,
) -> dict[str, tuple[float, float]]:  # fmt: skip
    """Plain steps to the cost with drafts, of all prompts of a category and of its slowest."""
    controller = None if knowing else Controller({w: [cost] for w, cost in costs.items()})
    drafters: list[Drafter] = [Suffix(Known()), Ngram(), *([head] if head else [])]
    speculator = Speculator(drafters, max(costs) - 1, controller)
    found = {}
    for name, group in answered.items():
        spent = [one(engine, speculator, costs, each, head) for each in group]
        plain = [len(each.answer) - 1 for each in group]
        ratios = [p / s for p, s in zip(plain, spent, strict=True) if p]
        found[name] = (sum(plain) / sum(spent), min(ratios))
    speculator.close()
    return found


def one(
    engine: Engine, speculator: Speculator, costs: Mapping[int, float], answered: Answered,
    head: Replayed | None,
) -> float:  # fmt: skip
    """The cost of one answer in plain steps."""
    if head:
        head.follow(answered)
    speculator.begin(engine.session(), answered.prompt)
    new, at, spent = answered.answer[:1], 1, 0.0
    with patch("cetane.speculate.speculator.time", head.clock if head else Clock()):
        while at < len(answered.answer):
            left = answered.answer[at:]
            draft = speculator.draft(new, min(len(left), max(costs)) - 1)
            if speculator.controller is None:
                drafts = [draft, *speculator.proposals]
                offers = [NO_DRAFT, *(d.first(width - 1) for d in drafts for width in costs)]
                draft = max(offers, key=lambda d: (1 + accepted(d, left)) / cost(costs, d))
            else:
                spent += speculator.proposing
            new = left[: 1 + accepted(draft, left)]
            speculator.settle(draft, new, cost(costs, draft) + speculator.proposing)
            at, spent = at + len(new), spent + cost(costs, draft)
    speculator.end(new)
    return spent


def accepted(draft: Draft, left: Sequence[int]) -> int:
    return len(draft.path(left[:-1]))


def cost(costs: Mapping[int, float], draft: Draft) -> float:
    return costs[min(width for width in costs if width > len(draft.tokens))]


if __name__ == "__main__":
    main()
