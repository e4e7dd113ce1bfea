"""Greedy tokens with drafts against those without, for every prompt with every drafter.

The longest draft takes turns: calls are 2 tokens wide, or 3, up to the widest call that verifies.
It takes finished bundles, so that contracts and families can be named: one with `tokens.verify = 8`
covers K = 2 to 8. Several drafters together make trees, where the plan takes them. Drafts are
always verified: the controller, which would skip many, is left out.

Calls of different widths add up in different orders. So where tokens differ, it says at which
place, and how far the two logits were apart there.
"""

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cetane.bundle import Bundle
from cetane.engine.engine import Engine
from cetane.engine.generate import generate
from cetane.engine.portable import Arithmetic, PortableBackend
from cetane.engine.sampling import Sampler
from cetane.engine.session import Session
from cetane.engine.verify import Draft
from cetane.gates.probes import asked
from cetane.prompts import suite
from cetane.speculate.drafter import Drafter
from cetane.speculate.ngram import Ngram
from cetane.speculate.speculator import Speculator
from cetane.speculate.suffix import EarlierAnswers, Suffix

OPENINGS = (
    "", "Answer briefly. ", "Answer as a list. ", "Think about it first. ", "Answer in rhyme. ",
    "Explain every step. ", "Answer with an example. ", "Say it to a child. ", "Be formal. ",
    "Give two answers. ",
)  # fmt: skip


class Known(Drafter):
    """Knows the answer, and is wrong at every so manyth token: never (0), or always (1)."""

    name = "known"

    def __init__(self, answer: Sequence[int], every: int, vocab: int) -> None:
        super().__init__()
        self.answer, self.every, self.vocab = list(answer), every, vocab

    def begin(self, session: Session, tokens: Sequence[int]) -> None:
        super().begin(session, tokens)
        self.start = len(self.tokens)

    def propose(self, most: int) -> Draft:
        at = len(self.tokens) - self.start
        said = [*self.answer[at : at + most], *[0] * most][:most]
        if self.every:
            said = [
                (t + 1) % self.vocab if (at + i) % self.every == 0 else t
                for i, t in enumerate(said)
            ]
        return Draft(tuple(said), self.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundles", nargs="+", type=Path)
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--arithmetic", choices=["fp32", "fp16", "stored"], default="stored")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = [
        check(Bundle(path), options.arithmetic, options.prompts, options.tokens)
        for path in options.bundles
    ]
    if options.json:
        print(json.dumps(results))
    raise SystemExit(any(result["different"] for result in results))


def check(bundle: Bundle, arithmetic: Arithmetic, count: int, length: int) -> dict[str, object]:
    engine = Engine(bundle.plan, PortableBackend(bundle, arithmetic), bundle.tables())
    widest = engine.plan.modes["verify"].tokens
    texts = [o + t for o, t in itertools.product(OPENINGS, itertools.chain(*suite().values()))]
    suffix, runs, accepted, different = Suffix(EarlierAnswers()), 0, 0, []
    room = engine.plan.recipe.cache.context - length
    for index, text in enumerate(texts[:count]):
        prompt = asked(bundle.tokenizer, text)[-room:]
        plain = list(generate(engine.session(), prompt, Sampler(), length))
        vocab = engine.plan.vocab
        known: list[Drafter] = [Known(plain, every, vocab) for every in (0, 1, 3)]
        alone: list[list[Drafter]] = [[drafter] for drafter in (Ngram(), suffix, *known)]
        for turn, drafters in enumerate([*alone, known[1:], [*known, suffix]]):
            speculator = Speculator(drafters, 1 + (index + turn) % (widest - 1))
            found = list(generate(engine.session(), prompt, Sampler(), length, (), speculator))
            runs += 1
            accepted += speculator.counters.accepted
            if found != plain:
                different.append(tie(engine, prompt, plain, found) | {"prompt": index})
        if (index + 1) % 20 == 0 or index + 1 == min(count, len(texts)):
            print(f"{bundle.path}, {arithmetic}: {index + 1} prompts, {runs} runs, "
                  f"{len(different)} differ", flush=True)  # fmt: skip
    suffix.close()
    return {
        "bundle": str(bundle.path), "arithmetic": arithmetic, "prompts": min(count, len(texts)),
        "runs": runs, "accepted": accepted, "different": different,
    }  # fmt: skip


def tie(engine: Engine, prompt: list[int], plain: list[int], found: list[int]) -> dict[str, object]:
    """Where two answers part, and by how much plain decoding preferred its token there."""
    at = next(i for i, (a, b) in enumerate(itertools.zip_longest(plain, found)) if a != b)
    session = engine.session()
    logits = session.feed(prompt)
    for token in plain[:at]:
        logits = session.feed([token])
    assert logits is not None
    best = np.sort(logits)[-2:]
    return {"at": at, "margin": float(best[1] - best[0])}


if __name__ == "__main__":
    main()
