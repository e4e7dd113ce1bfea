"""Pass keys found by a model, by length, depth and what its key/value heads see.

All heads see all tokens, or a share of them does, or every head sees the newest tokens alone
(windowed full attention). The share is chosen by attention mass, by trained gates or by chance
(DuoAttention).

    python benchmarks/streaming_heads.py MODEL [--lengths 1024 2048 4096 8192]
        [--depths 0.05 0.25 0.5 0.75 0.95] [--texts 4] [--keys 1] [--shares 0.75 0.5 0.25]
        [--methods mass gates chance] [--steps 40] [--windows 2048] [--scores FOLDER] [--bf16]

A depth is the part of the text before the key, so a key lies `(1 - depth) * length` tokens before
the question. With `--bf16` the model computes in bf16, which is several times faster with AMX.
"""

import time
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np

from cetane.checkpoint import SeenByHeads
from cetane.families import streaming_layers
from cetane.files import silent
from cetane.fitting.pass_keys import PassKeys, found, hide
from cetane.gates.reference import Reference
from cetane.gates.streaming import StreamingAttention, attending
from cetane.pipeline.heads import FIRST, SCORED, TAUGHT, TEXTS, cache_sizes, haystack, score
from cetane.pipeline.request import Request, make_request
from cetane.schema.streaming import HeadScores, ScoreMethod, Streaming
from common import arguments, report

ALL = SeenByHeads({}, 0, 1)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--depths", type=float, nargs="+", default=[0.05, 0.25, 0.5, 0.75, 0.95])
    parser.add_argument("--texts", type=int, default=4, help="of each depth")
    parser.add_argument("--keys", type=int, default=1)
    parser.add_argument("--shares", type=float, nargs="*", default=[0.75, 0.5, 0.25])
    parser.add_argument("--methods", nargs="*", default=["mass", "gates", "chance"])
    parser.add_argument("--steps", type=int, help="texts that train gates")
    parser.add_argument("--windows", type=int, nargs="*", default=[], help="tokens seen by all")
    parser.add_argument("--scores", type=Path, help="a folder that keeps scores by method")
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    request = make_request(options.model, context=max(options.lengths))
    model = Reference(request.checkpoint).model
    if options.bf16:
        model.bfloat16()
    choices = chosen(options, request, model)
    straw, rows = haystack(request.checkpoint.tokenizer), []
    for length in options.lengths:
        texts = {
            depth: [
                hide(request.checkpoint.tokenizer, straw, length, seed, options.keys, depth)
                for seed in range(options.texts)
            ]
            for depth in options.depths
        }
        whole = 0
        for name, (seen, nbytes) in choices.items():
            began = time.perf_counter()
            right = recall(model, seen, texts)
            total = sum(right.values())
            whole = total if name == "all" else whole
            asked = options.texts * options.keys * len(texts)
            by_depth = " ".join(str(count) for count in right.values())
            rows.append(
                [length, name, nbytes / 1e6, total, asked, total / whole if whole else 0, by_depth]
            )
            print(rows[-1], f"{time.perf_counter() - began:.0f} s", flush=True)
    columns = ["tokens", "heads", "cache MB", "found", "of", "of the model's", "by depth"]
    report("pass keys", columns, rows, {"depths": options.depths, "rows": rows}, options.json)


def chosen(options: Namespace, request: Request, model: Any) -> dict[str, tuple[SeenByHeads, int]]:
    """What heads see, and the bytes of the caches at the longest length, by name."""
    layers = streaming_layers(request.planner.authored)
    sizes = cache_sizes(request, layers)
    with TemporaryDirectory() as temporary:
        kept = options.scores or Path(temporary)
        kept.mkdir(exist_ok=True)
        scores = {
            method: scored(kept / f"{method}.json", method, options.steps, request, model, layers)
            for method in options.methods
        }
    choices = {"all": (ALL, sizes.whole)}
    for share in options.shares:
        for method in options.methods:
            one = Streaming(scores=scores[method], full=share)
            seen = SeenByHeads(one.kept(), one.sinks, one.window)
            choices[f"{share:.0%} by {method}"] = seen, sizes.nbytes(one)
    for window in options.windows:
        least = cache_sizes(request, layers, sinks=0, window=window).least
        choices[f"window {window}"] = SeenByHeads(dict.fromkeys(layers, ()), 0, window), least
    return choices


def scored(
    path: Path, method: ScoreMethod | Literal["chance"], steps: int | None, request: Request,
    model: Any, layers: Mapping[int, int],
) -> HeadScores:  # fmt: skip
    """Scores by a method, from their file if it is there."""
    if path.exists():
        return HeadScores.model_validate_json(path.read_text())
    began, tokenizer = time.perf_counter(), request.checkpoint.tokenizer
    if method == "chance":
        found = by_chance(request, layers)
    else:
        count = steps if steps and method == "gates" else TEXTS[method]
        straw = haystack(tokenizer)
        texts = [hide(tokenizer, straw, SCORED, FIRST + seed, TAUGHT) for seed in range(count)]
        found = score(request, model, layers, texts, method, silent)
    path.write_text(found.model_dump_json())
    print(f"{method}: {time.perf_counter() - began:.0f} s", flush=True)
    return found


def by_chance(request: Request, layers: Mapping[int, int]) -> HeadScores:
    """Random scores."""
    random = np.random.default_rng(0)
    count = request.checkpoint.config["num_hidden_layers"]
    rows = tuple(tuple(random.random(layers.get(layer, 0)).tolist()) for layer in range(count))
    kind = request.checkpoint.config["model_type"]
    return HeadScores(source="chance", model_type=kind, method="mass", settings={}, layers=rows)


def recall(
    model: Any, seen: SeenByHeads, texts: Mapping[float, list[PassKeys]]
) -> dict[float, int]:
    """The number of keys found at each depth."""
    with attending(model, StreamingAttention(seen)):
        return {depth: sum(sum(found(model, t)) for t in each) for depth, each in texts.items()}


if __name__ == "__main__":
    main()
