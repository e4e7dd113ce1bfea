"""How often drafters know the next token, turn by turn of a conversation, as CoreML-LLM's log of
SuffixDecoding reports it: over the turns, its trie had a proposal at 2, 29 and 48 % of the
positions, and 18.4 % of these were right.

All drafters are asked at the same positions of the same greedy answers: look-ups, and the bundle's
best draft head. Tries keep the answers of earlier turns, and of earlier conversations. The last row
is what the union drafts: look-ups where they propose, else the head.
"""

import argparse
import json
from collections.abc import Sequence
from functools import partial
from itertools import compress
from pathlib import Path

from cetane.bundle import Bundle
from cetane.engine.sampling import Sampler
from cetane.engine.session import Session
from cetane.engine.verify import NO_DRAFT, Draft
from cetane.pipeline.language_model import load
from cetane.speculate.bench import FirstTokens
from cetane.speculate.drafter import Drafter, open_session
from cetane.speculate.open import DrafterOptions, open_drafters

CONVERSATIONS = (
    ("What is a lighthouse?", "Who built the first one?", "Write that as a list.",
     "Now say all of it again in two sentences."),
    ("Write a Python function that reverses a string.", "Add a docstring to it.",
     "Rename it to backwards.", "Write a test for it."),
    ("Give me a recipe for pancakes.", "Make it vegan.", "Write only the ingredients.",
     "Write the vegan recipe for eight people."),
)  # fmt: skip


class Asked:
    """Several drafters, each asked at every position; a `DraftSource`."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self.asked = [FirstTokens(drafter) for drafter in drafters]

    def begin(self, session: Session, tokens: Sequence[int]) -> None:
        for one in self.asked:
            one.begin(session, tokens)

    def draft(self, new: Sequence[int], most: int) -> Draft:
        for one in self.asked:
            one.draft(new, most)
        return NO_DRAFT

    def settle(self, draft: Draft, new: Sequence[int], seconds: float) -> None:
        for one in self.asked:
            one.settle(draft, new, seconds)

    def end(self, new: Sequence[int]) -> None:
        for one in self.asked:
            one.end(new)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--tokens", type=int, default=96)
    options = parser.parse_args()
    counts: dict[tuple[str, int], list[int]] = {}
    model = load(options.bundle, speculative=None)
    bundle = Bundle(options.bundle)
    drafters = open_drafters(DrafterOptions(), bundle, Sampler(), "auto", remember=False)
    for questions in CONVERSATIONS:
        turns: list[dict[str, str]] = []
        for turn, question in enumerate(questions, 1):
            turns.append({"role": "user", "content": question})
            asked = Asked(drafters)
            model._speculator = asked  # type: ignore[assignment]  # asks, and never drafts
            new = partial(open_session, model.engine, drafters)
            model._new_session = new  # type: ignore[method-assign]
            model._held = []
            text = model.chat(turns, max_new_tokens=options.tokens).text
            turns.append({"role": "assistant", "content": text})
            for one in asked.asked:
                add(counts, one.drafter.name, turn, one.proposed, one.right)
            suffix, ngram, *heads = asked.asked
            either = [s or n for s, n in zip(suffix.proposed, ngram.proposed, strict=True)]
            known = [s or n for s, n in zip(suffix.right, ngram.right, strict=True)]
            add(counts, "tree of both", turn, either, known)
            for head in heads:
                chosen = [k if e else h for k, e, h in zip(known, either, head.right, strict=True)]
                add(counts, "union with the head", turn, [True] * len(chosen), chosen)
    for (name, turn), (positions, hits, right) in counts.items():
        print(
            json.dumps(
                {"drafter": name, "turn": turn, "positions": positions,
                 "hits": round(hits / positions, 3), "right": round(right / max(hits, 1), 3)}
            )
        )  # fmt: skip


def add(
    counts: dict[tuple[str, int], list[int]],
    name: str,
    turn: int,
    proposed: Sequence[bool],
    right: Sequence[bool],
) -> None:
    count = counts.setdefault((name, turn), [0, 0, 0])
    count[0] += len(proposed)
    count[1] += sum(proposed)
    count[2] += sum(compress(right, proposed))


if __name__ == "__main__":
    main()
