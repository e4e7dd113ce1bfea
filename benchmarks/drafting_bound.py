"""What look-ups could gain at most over a bundle's greedy answers, with calls of given cost.

The model answers the speculative suite once. Then drafts are replayed on these answers: as the
controller decides, and as one who knows the answer would, who verifies a draft exactly where it
pays. No time is measured: calls cost what `--calls` says, in plain steps, by their width.

    python benchmarks/drafting_bound.py BUNDLE --calls 4:1.05 4:1.33 4:1.33,8:1.6
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from cetane.bundle import Bundle
from cetane.engine.engine import Engine
from cetane.engine.open import open_engine
from cetane.engine.verify import NO_DRAFT, Draft
from cetane.gates.probes import asked
from cetane.speculate.bench import suite, take
from cetane.speculate.controller import Controller
from cetane.speculate.ngram import Ngram
from cetane.speculate.speculator import Speculator
from cetane.speculate.suffix import EarlierAnswers, Suffix
from common import arguments, report

Answered = tuple[Sequence[int], list[int]]
"""A prompt and its answer."""


class Known(EarlierAnswers):
    """Answers that are inserted at once, so that two replays are the same."""

    def add(self, adapter: str | None, tokens: Sequence[int]) -> None:
        self.tries[adapter] = self.trie(adapter).insert(tokens)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--calls", nargs="+", required=True, help="4:1.33,8:1.6 and so on")
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of an answer")
    options = parser.parse_args()
    bundle = Bundle(Path(options.model))
    engine, ends = open_engine(bundle), bundle.tokenizer.eos_ids
    answered: dict[str, list[Answered]] = {}
    for category, texts in suite().items():
        prompts = [asked(bundle.tokenizer, text) for text in texts]
        answered[category] = [
            (p, take(engine, p, options.tokens, ends, None).tokens) for p in prompts
        ]
    rows = []
    for given in options.calls:
        pairs = (pair.split(":") for pair in given.split(","))
        costs = {1: 1.0, **{int(width): float(steps) for width, steps in pairs}}
        decided, best = (replay(engine, answered, costs, knowing) for knowing in (False, True))
        rows += [[given, name, *decided[name], best[name][0]] for name in answered]
    columns = ["calls", "prompts", "by the controller", "its slowest", "at best"]
    report("bound of drafting", columns, rows, {"rows": rows}, options.json)


def replay(
    engine: Engine, answered: Mapping[str, Sequence[Answered]], costs: Mapping[int, float],
    knowing: bool,
) -> dict[str, tuple[float, float]]:  # fmt: skip
    """Plain steps to the cost with drafts, of all prompts of a category and of its slowest."""
    controller = None if knowing else Controller({w: [cost] for w, cost in costs.items()})
    speculator = Speculator([Suffix(Known()), Ngram()], max(costs) - 1, controller)
    found = {}
    for name, group in answered.items():
        spent = [one(engine, speculator, costs, *pair) for pair in group]
        plain = [len(answer) - 1 for _, answer in group]
        ratios = [p / s for p, s in zip(plain, spent, strict=True) if p]
        found[name] = (sum(plain) / sum(spent), min(ratios))
    speculator.close()
    return found


def one(
    engine: Engine, speculator: Speculator, costs: Mapping[int, float], prompt: Sequence[int],
    answer: Sequence[int],
) -> float:  # fmt: skip
    """The cost of one answer in plain steps."""
    speculator.begin(engine.session(), prompt)
    new, at, spent = answer[:1], 1, 0.0
    while at < len(answer):
        left = answer[at:]
        draft = speculator.draft(new, min(len(left), max(costs)) - 1)
        if speculator.controller is None:
            drafts = [draft, *speculator.proposals]
            offers = [NO_DRAFT, *(d.first(width - 1) for d in drafts for width in costs)]
            draft = max(offers, key=lambda d: (1 + accepted(d, left)) / cost(costs, d))
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
