"""A bundle with several capacities beside one with the context alone.

They have the same weights, and run in one process, in turns: a noisy machine disturbs both.
It reports the time to lower every number of capacities, and decoding after `--position` tokens. It
also compares the greedy tokens of both across every crossing, and predicts steps on chips.
docs/explanation/capacities.md has the tables.

    python benchmarks/capacities.py MODEL [--capacities 512 2048] [--context 8192]
"""

import statistics
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from cetane.checkpoint import Checkpoint, open_checkpoint
from cetane.engine.engine import Engine
from cetane.engine.open import open_engine
from cetane.engine.session import Session
from cetane.gates.probes import text_tokens
from cetane.hardware.chips import find_chip
from cetane.lower.convert import convert_shard
from cetane.lower.lower import Lowering
from cetane.perf.capacities import capacity_costs
from cetane.perf.predict import Predictor
from cetane.planner import Planner
from cetane.schema.changes import override
from cetane.schema.recipe import Recipe, load_recipe
from common import arguments, bundle_of, report

Rows = list[list[Any]]
CHIPS = ("a19-pro", "m1", "m4-max")
PREDICTED = ["chip", "capacity", "functions", "ms", "tokens/s", "copy, ms", "pays after, tokens"]
CROSSING = 12
"""Greedy tokens that are compared around every crossing: half before it, half after."""


def recipe_of(base: str, capacities: list[int], context: int) -> Recipe:
    """The recipe with these capacities, under a name of its own."""
    sizes = "-".join(map(str, [*capacities, context]))
    changes = {"name": f"{base}-{sizes}", "cache.context": context, "cache.capacities": capacities}
    return override(load_recipe(base), changes)


def lowering_seconds(checkpoint: Checkpoint, recipe: Recipe) -> tuple[int, float, int]:
    """The functions of the first shard, the seconds to convert it anew, and its bytes."""
    planner = Planner(checkpoint, recipe)
    shard = next(iter(planner.members))
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "shard.mlpackage"
        lowering = Lowering(planner, checkpoint)
        started = time.perf_counter()
        convert_shard(planner, shard, lowering.constants(shard), target)
        seconds = time.perf_counter() - started
        size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    return len(planner.graphs(shard)), seconds, size


def after(engine: Engine, ids: tuple[int, ...], position: int) -> Session:
    """A session that holds the first tokens of a text."""
    session = engine.session(["decode", "prefill"])
    session.feed(ids[:position], "none")
    return session


def decode_seconds(session: Session, ids: tuple[int, ...], steps: int) -> float:
    """The median time of plain steps."""
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        session.feed(ids[session.position : session.position + 1])
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def greedy(engine: Engine, ids: tuple[int, ...], position: int) -> list[int]:
    """Greedy tokens after a text."""
    session = engine.session(["decode", "prefill"])
    logits = session.feed(ids[:position])
    tokens = []
    for _ in range(CROSSING):
        assert logits is not None
        tokens.append(int(logits.argmax()))
        logits = session.feed(tokens[-1:])
    return tokens


def measure_lowering(checkpoint: Checkpoint, sizes: list[int], options: Namespace) -> Rows:
    """`lowering_seconds` for every number of capacities."""
    rows = [
        list(lowering_seconds(checkpoint, recipe_of(options.recipe, sizes[:n], options.context)))
        for n in range(len(sizes) + 1)
    ]
    report("conversion of the first shard", ["functions", "seconds", "bytes"], rows, {}, False)
    return rows


def measure_decoding(
    engines: list[Engine], ids: tuple[int, ...], position: int, steps: int
) -> list[float]:
    """The tokens per second of each engine, which take turns."""
    times: list[list[float]] = [[] for _ in engines]
    sessions = [after(engine, ids, position) for engine in engines]
    for _ in range(3):
        for session, own in zip(sessions, times, strict=True):
            own.append(decode_seconds(session, ids, steps // 3))
    return [1 / statistics.median(own) for own in times]


def compare_crossings(engines: list[Engine], ids: tuple[int, ...], sizes: list[int]) -> Rows:
    """Whether both engines choose the same tokens where one grows beyond each size."""
    rows: Rows = []
    for size in sizes:
        one, other = (greedy(engine, ids, size - CROSSING // 2) for engine in engines)
        rows.append([size, one == other])
    report("greedy tokens at every crossing", ["capacity", "same tokens"], rows, {}, False)
    return rows


def predictions(checkpoint: Checkpoint, recipe: Recipe) -> Rows:
    """The rows of `PREDICTED`."""
    planner = Planner(checkpoint, recipe)
    return [
        [chip, c.tokens, c.functions, c.decode.ms, c.decode.tok_s, c.crossing, c.break_even or ""]
        for chip in CHIPS
        for c in capacity_costs(Predictor(find_chip(chip)), planner)
    ]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--recipe", default="int8")
    parser.add_argument("--capacities", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--position", type=int, default=480)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--lowering", action="store_true", help="measure conversions too")
    options = parser.parse_args()
    checkpoint = open_checkpoint(options.model)
    sizes: list[int] = options.capacities
    recipes = [recipe_of(options.recipe, some, options.context) for some in ([], sizes)]
    result: dict[str, Any] = {"position": options.position}
    if options.lowering:
        result["lowering"] = measure_lowering(checkpoint, sizes, options)
    bundles = [bundle_of(checkpoint, recipe) for recipe in recipes]
    engines = [open_engine(bundle, "portable") for bundle in bundles]
    ids = text_tokens(bundles[0].tokenizer, options.context)
    alone, growing = measure_decoding(engines, ids, options.position, options.steps)
    result |= {"alone": alone, "growing": growing, "ratio": growing / alone}
    rows = [[r.name, speed] for r, speed in zip(recipes, (alone, growing), strict=True)]
    report(f"decoding after {options.position} tokens, tokens/s; ratio {growing / alone:.2f}",
           ["bundle", "tokens/s"], rows, {}, as_json=False)  # fmt: skip
    result["same"] = compare_crossings(engines, ids, sizes)
    result["predicted"] = predictions(checkpoint, recipes[1])
    report("predicted", PREDICTED, result["predicted"], result, options.json)


if __name__ == "__main__":
    main()
