"""How often drafters know the next token, turn by turn of a conversation.

CoreML-LLM's log of SuffixDecoding reports it so. Over the turns, its trie had a proposal at 2, 29
and 48 % of the positions, and 18.4 % of these were right.

All drafters are asked at the same positions of the same greedy answers: look-ups, and the bundle's
best draft head. Tries keep the answers of earlier turns, and of earlier conversations. The last row
is what the union drafts: look-ups where they propose, else the head.
"""

import argparse
import json
from collections.abc import Sequence
from itertools import compress
from pathlib import Path

from cetane.bundle import Bundle
from cetane.engine.open import open_engine
from cetane.engine.sampling import Sampler
from cetane.speculate.first_tokens import first_tokens_by_turn
from cetane.speculate.open import DrafterOptions, open_drafters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--tokens", type=int, default=96)
    options = parser.parse_args()
    counts: dict[tuple[str, int], list[int]] = {}
    bundle = Bundle(options.bundle)
    drafters = open_drafters(DrafterOptions(), bundle, Sampler(), "auto", remember=False)
    turns = first_tokens_by_turn(open_engine(bundle), bundle.tokenizer, drafters, options.tokens)
    for turn, asked in enumerate(turns, 1):
        for one in asked:
            add(counts, one.drafter.name, turn, one.proposed, one.right)
        suffix, ngram, *heads = asked
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
