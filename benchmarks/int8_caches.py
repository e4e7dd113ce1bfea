"""A bundle whose host keeps keys and values in int8 beside one that keeps them in fp16.

They have the same weights, and run in one process, in turns: a noisy machine disturbs both.
Reported are the bytes of the caches, decode steps after `--position` tokens, and predicted steps on
chips. Perplexity and divergence are those of `--tokens` tokens of documentation after `--before`
others. docs/explanation/int8-caches.md has the tables.

    python benchmarks/int8_caches.py MODEL [--context 8192] [--skip speed quality]
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint, open_checkpoint
from cetane.engine.engine import Engine
from cetane.engine.open import open_engine
from cetane.engine.portable import Arithmetic, PortableBackend
from cetane.gates.metrics import log_softmax
from cetane.gates.quality import read_tokens
from cetane.hardware.chips import find_chip
from cetane.mil.fast import share_threads
from cetane.perf.predict import Predictor
from cetane.planner import Planner
from cetane.schema.changes import override
from cetane.schema.recipe import Recipe, load_recipe
from common import all_logits, arguments, bundle_of, report, standard_library_text

CHIPS = ("a19-pro", "m4-max")
FORMATS = ("fp16", "int8")
Clock = Callable[[], float]
PIECE = 256
"""The tokens whose logits are in memory at once."""


def recipe_of(base: str, context: int, kept: str) -> Recipe:
    """The recipe with these caches, in one package, under a name of its own."""
    changes = {
        "name": f"{base}-{context}-{kept}-caches",
        "layout.kind": "single",
        "cache.context": context,
        "cache.format": kept,
        "target.deployment": "iOS26",
    }
    return override(load_recipe(base), changes)


def log_shares(
    bundle: Bundle, ids: list[int], before: int, arithmetic: Arithmetic
) -> list[np.ndarray]:
    """Logarithms of the shares after each token from `before` on."""
    engine = Engine(bundle.plan, PortableBackend(bundle, arithmetic), bundle.tables())
    session = engine.session()
    if before:
        session.feed(ids[:before], "none")
    pieces = []
    for start in range(before, len(ids), PIECE):
        rows = all_logits(session, ids[start : start + PIECE])
        pieces.append(log_softmax(rows).astype(np.float32))
    return pieces


def quality(
    bundles: dict[str, Bundle], ids: list[int], before: int, arithmetic: Arithmetic
) -> dict[str, Any]:
    """Perplexities, and how far the second bundle is from the first."""
    shares = {
        name: np.concatenate(log_shares(bundle, ids, before, arithmetic))
        for name, bundle in bundles.items()
    }
    targets = np.array(ids[before + 1 :])
    rows = np.arange(len(targets))
    plain, rounded = (shares[name][:-1].astype(np.float64) for name in FORMATS)
    divergences = (np.exp(plain) * (plain - rounded)).sum(1)
    return {
        "tokens": len(targets),
        "perplexity": {
            name: float(np.exp(-one[rows, targets].mean()))
            for name, one in (("fp16", plain), ("int8", rounded))
        },
        "kl": float(divergences.mean()),
        "largest_kl": float(divergences.max()),
        "same_choice": float((plain.argmax(1) == rounded.argmax(1)).mean()),
    }


def speed(
    bundles: dict[str, Bundle], ids: list[int], position: int, steps: int, clock: Clock
) -> dict[str, Any]:
    """The medians of decode steps, one of each bundle in turn, and the median of their ratios."""
    sessions = {}
    for name, bundle in bundles.items():
        sessions[name] = open_engine(bundle, "portable").session(["decode", "prefill"])
        sessions[name].feed(ids[:position], "none")
    times: dict[str, list[float]] = {name: [] for name in bundles}
    for step in range(steps + 4):
        for name, session in sessions.items():
            started = clock()
            session.feed(ids[position + step : position + step + 1])
            times[name].append(clock() - started)
    measured = {name: one[4:] for name, one in times.items()}
    ratios = [b / a for a, b in zip(*measured.values(), strict=True)]
    return {name: 1e3 * statistics.median(one) for name, one in measured.items()} | {
        "ratio": statistics.median(ratios),
        "quartiles": [float(q) for q in np.quantile(ratios, [0.25, 0.75])],
    }


def predicted(checkpoint: Checkpoint, recipes: dict[str, Recipe]) -> dict[str, dict[str, float]]:
    """Predicted milliseconds of a decode step at the context, by chip and format."""
    planners = {name: Planner(checkpoint, recipe) for name, recipe in recipes.items()}
    return {
        chip: {
            name: Predictor(find_chip(chip)).predict(planner, "decode").ms
            for name, planner in planners.items()
        }
        for chip in CHIPS
    }


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--recipe", default="int8")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--before", type=int, default=0)
    parser.add_argument(
        "--arithmetic", default="fp32", choices=["fp32", "stored"], help="of the quality"
    )
    parser.add_argument("--position", type=int, default=500)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--one-thread", action="store_true", help="measure its processor time")
    parser.add_argument("--skip", nargs="*", default=[], choices=["quality", "speed"])
    options = parser.parse_args()
    clock: Clock = time.thread_time if options.one_thread else time.perf_counter
    if not options.one_thread:
        share_threads()
    checkpoint = open_checkpoint(options.model)
    recipes = {kept: recipe_of(options.recipe, options.context, kept) for kept in FORMATS}
    bundles = {kept: bundle_of(checkpoint, recipe) for kept, recipe in recipes.items()}
    caches = {name: b.plan.kv_bytes[options.context] for name, b in bundles.items()}
    result: dict[str, Any] = {"context": options.context, "cache_bytes": caches}
    ids = list(
        read_tokens(
            bundles["fp16"].tokenizer,
            standard_library_text(),
            max(options.before + options.tokens, options.position + options.steps + 4),
        )
    )
    rows = [["caches, MB", *(size / 1e6 for size in caches.values())]]
    if "quality" not in options.skip:
        judged = ids[: options.before + options.tokens]
        found = quality(bundles, judged, options.before, options.arithmetic)
        result["quality"] = found
        rows.append(["perplexity", *found["perplexity"].values()])
        rows += [[name, "", found[name]] for name in ("kl", "largest_kl", "same_choice")]
    if "speed" not in options.skip:
        result["speed"] = found = speed(bundles, ids, options.position, options.steps, clock)
        rows.append([f"step after {options.position}, ms", found["fp16"], found["int8"]])
        rows.append(["ratio", "", found["ratio"]])
    result["predicted"] = predicted(checkpoint, recipes)
    rows += [[f"{chip}, predicted ms", *ms.values()] for chip, ms in result["predicted"].items()]
    report("caches", ["", *FORMATS], rows, result, options.json)


if __name__ == "__main__":
    main()
