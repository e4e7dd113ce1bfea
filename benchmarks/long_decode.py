"""A long greedy decode, one token a call: memory must not grow, a fresh process must give the same
tokens, and so must a prefill of the whole text.

Every run is a process of its own, whose resident memory is read every 100 steps (Linux).
"""

import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from cetane.bundle import Bundle
from cetane.checkpoint import open_checkpoint
from cetane.engine.engine import Engine
from cetane.engine.generate import generate, open_engine
from cetane.engine.sampling import Sampler
from cetane.gates.probes import chat_prompts
from cetane.schema.recipe import parse_recipe
from common import arguments, bundle_of, report

EVERY, WARM_UP = 100, 200
PREFILL = 64
LIMIT = 8.0
"""MB that memory may grow by after the warm-up. To keep one column of SmolLM2's caches from every
step would take 83."""


@dataclass
class Run:
    """What a process did."""

    tokens: list[int]
    resident: list[float]
    """MB, every 100 steps."""
    agreement: float
    """Share of the tokens that a prefill of the text chooses as well."""
    seconds: float


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--contracts", nargs="+", default=["stateful", "readonly"])
    options = parser.parse_args()
    checkpoint = open_checkpoint(options.model)
    prompt = chat_prompts(checkpoint.tokenizer, 1)[0]
    context = -(-(len(prompt) + options.steps + PREFILL) // 32) * 32
    rows, result = [], {}
    for contract in options.contracts:
        name = f"long-{contract}-{context}"
        content = {"name": name, "cache": {"contract": contract, "context": context},
                   "tokens": {"verify": 0, "prefill": PREFILL}, "head": {"slices": 2}}  # fmt: skip
        bundle = bundle_of(checkpoint, parse_recipe(content, name))
        first, fresh = (in_a_process(bundle.path, prompt, options.steps) for _ in range(2))
        growth = [run.resident[-1] - run.resident[WARM_UP // EVERY - 1] for run in (first, fresh)]
        same = first.tokens == fresh.tokens
        result[contract] = {
            "same_tokens": same,
            "prefill_agreement": first.agreement,
            "growth_mb": growth,
            "resident_mb": first.resident,
            "tokens_per_second": options.steps / first.seconds,
            "passed": same and first.agreement == 1.0 and max(growth) <= LIMIT,
        }
        rows.append([
            contract, len(first.tokens), same, f"{first.agreement:.4f}",
            f"{first.resident[-1]:.0f} MB", " ".join(f"{g:+.2f} MB" for g in growth),
            options.steps / first.seconds, "pass" if result[contract]["passed"] else "FAIL",
        ])  # fmt: skip
    columns = ["contract", "tokens", "fresh process", "prefill agrees", "resident",
               f"growth after {WARM_UP}", "tokens/s", "verdict"]  # fmt: skip
    report(f"{options.steps} greedy steps", columns, rows, result, options.json)


def in_a_process(bundle: Path, prompt: list[int], steps: int) -> Run:
    """`decode` in a fresh interpreter."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(decode, bundle, prompt, steps).result()


def decode(path: Path, prompt: list[int], steps: int) -> Run:
    """Greedy tokens from calls of one token, whatever they are: no token ends it."""
    engine = open_engine(Bundle(path), "portable")
    tokens: list[int] = []
    resident = []
    session = engine.session(["decode"])
    started = time.perf_counter()
    for token in generate(session, prompt, Sampler(), steps):
        tokens.append(token)
        if len(tokens) % EVERY == 0:
            resident.append(resident_mb())
            print(f"{path.name}: {len(tokens)}, {resident[-1]:.1f} MB", file=sys.stderr)
    seconds = time.perf_counter() - started
    del session
    return Run(tokens, resident, prefill_agreement(engine, prompt, tokens), seconds)


def prefill_agreement(engine: Engine, prompt: list[int], tokens: list[int]) -> float:
    """How many of the tokens are chosen again when all of them are known."""
    session = engine.session(["prefill"])
    text = [*prompt, *tokens[:-1]]
    chosen: list[int] = []
    for start in range(0, len(text), PREFILL):
        logits = session.feed(text[start : start + PREFILL], "all")
        assert logits is not None
        chosen += logits.argmax(-1).tolist()
    return float(np.mean(np.equal(chosen[len(prompt) - 1 :], tokens)))


def resident_mb() -> float:
    """Of this process, as Linux tells it."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


if __name__ == "__main__":
    main()
