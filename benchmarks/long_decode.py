"""A long greedy decode, one token a call. Memory must not grow. A fresh process must give the same
tokens, and so must a prefill of the whole text.

Every run is a process of its own, whose resident memory is read every 100 steps (Linux). These are
its own pages, and pages of mapped files, which the system drops when it needs room. A new token
maps its row of the embedding.
"""

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
from cetane.engine.generate import generate
from cetane.engine.open import open_engine
from cetane.engine.sampling import Sampler
from cetane.gates.probes import chat_prompts
from cetane.schema.recipe import parse_recipe
from common import all_logits, arguments, bundle_of, report

EVERY, WARM_UP = 100, 200
PREFILL = 64
LIMIT = 1.0
"""MB that a process's own memory may grow by after the warm-up. To keep one column of SmolLM2's
caches from every step would take 83."""


@dataclass
class Run:
    """What a process did."""

    tokens: list[int]
    own: list[float]
    """MB of the process's own pages, every 100 steps."""
    mapped: list[float]
    """MB of pages of files."""
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
        own = [growth(run.own) for run in (first, fresh)]
        mapped = [growth(run.mapped) for run in (first, fresh)]
        same = first.tokens == fresh.tokens
        result[contract] = {
            "same_tokens": same,
            "prefill_agreement": first.agreement,
            "own_growth_mb": own,
            "mapped_growth_mb": mapped,
            "own_mb": first.own,
            "mapped_mb": first.mapped,
            "tokens_per_second": options.steps / first.seconds,
            "passed": same and first.agreement == 1.0 and max(own) <= LIMIT,
        }
        rows.append([
            contract, len(first.tokens), same, f"{first.agreement:.4f}",
            f"{first.own[-1] + first.mapped[-1]:.0f} MB", megabytes(own), megabytes(mapped),
            options.steps / first.seconds, "pass" if result[contract]["passed"] else "FAIL",
        ])  # fmt: skip
    columns = ["contract", "tokens", "fresh process", "prefill agrees", "resident",
               f"own memory after {WARM_UP}", "mapped files", "tokens/s", "verdict"]  # fmt: skip
    report(f"{options.steps} greedy steps", columns, rows, result, options.json)


def in_a_process(bundle: Path, prompt: list[int], steps: int) -> Run:
    """`decode` in a fresh interpreter."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(decode, bundle, prompt, steps).result()


def decode(path: Path, prompt: list[int], steps: int) -> Run:
    """Greedy tokens from calls of one token, whatever they are: no token ends it."""
    engine = open_engine(Bundle(path), "portable")
    tokens: list[int] = []
    own, mapped = [], []
    session = engine.session(["decode"])
    for cache in session.memory.caches.values():
        cache.fill(0)  # else the first write to each of its pages would look like growth
    started = time.perf_counter()
    for token in generate(session, prompt, Sampler(), steps):
        tokens.append(token)
        if len(tokens) % EVERY == 0:
            own.append(resident_mb("RssAnon"))
            mapped.append(resident_mb("RssFile"))
            print(f"{path.name}: {len(tokens)}, {own[-1]:.2f} + {mapped[-1]:.2f} MB",
                  file=sys.stderr)  # fmt: skip
    seconds = time.perf_counter() - started
    del session
    return Run(tokens, own, mapped, prefill_agreement(engine, prompt, tokens), seconds)


def prefill_agreement(engine: Engine, prompt: list[int], tokens: list[int]) -> float:
    """How many of the tokens are chosen again when all of them are known."""
    session = engine.session(["prefill"])
    text = [*prompt, *tokens[:-1]]
    chosen: list[int] = []
    for start in range(0, len(text), PREFILL):
        chosen += all_logits(session, text[start : start + PREFILL]).argmax(-1).tolist()
    return float(np.mean(np.equal(chosen[len(prompt) - 1 :], tokens)))


def growth(samples: list[float]) -> float:
    """MB after the warm-up."""
    return samples[-1] - samples[WARM_UP // EVERY - 1]


def megabytes(amounts: list[float]) -> str:
    return " ".join(f"{amount:+.2f} MB" for amount in amounts)


def resident_mb(kind: str) -> float:
    """Resident memory of this process of a kind, as Linux tells it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith(f"{kind}:"))
    return int(kilobytes) * 1024 / 1e6


if __name__ == "__main__":
    main()
