"""Pass keys found by a model of which a share of the key/value heads keeps all tokens, by length,
share and the way to choose heads: attention mass, trained gates, and by chance.

    python benchmarks/streaming_heads.py MODEL [--lengths 1024 2048 4096 8192] [--texts 5]
        [--keys 1] [--shares 0.75 0.5 0.25] [--methods mass gates chance] [--steps 40]
"""

import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from cetane.checkpoint import SeenByHeads
from cetane.families import streaming_layers
from cetane.fitting.pass_keys import found, hide
from cetane.gates.reference import Reference
from cetane.gates.streaming import StreamingAttention, attending
from cetane.pipeline.heads import FIRST, SCORED, TAUGHT, TEXTS, haystack, score
from cetane.pipeline.request import make_request
from cetane.schema.streaming import HeadScores, Streaming
from common import arguments, report


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--texts", type=int, default=5)
    parser.add_argument("--keys", type=int, default=1)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.75, 0.5, 0.25])
    parser.add_argument("--methods", nargs="+", default=["mass", "gates", "chance"])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--scores", type=Path, help="a folder that keeps scores by method")
    options = parser.parse_args()
    request = make_request(options.model)
    tokenizer = request.checkpoint.tokenizer
    layers = streaming_layers(request.planner.authored)
    model, straw = Reference(request.checkpoint).model, haystack(tokenizer)
    with TemporaryDirectory() as temporary:
        kept = options.scores or Path(temporary)
        kept.mkdir(exist_ok=True)
        scores = {}
        for method in options.methods:
            path = kept / f"{method}.json"
            if path.exists():
                scores[method] = HeadScores.model_validate_json(path.read_text())
                continue
            began = time.perf_counter()
            if method == "chance":
                scores[method] = by_chance(scores["mass"])
            else:
                count = options.steps if options.steps and method == "gates" else TEXTS[method]
                texts = [
                    hide(tokenizer, straw, SCORED, FIRST + seed, TAUGHT) for seed in range(count)
                ]
                scores[method] = score(request, model, layers, texts, method, lambda *_: None)
            path.write_text(scores[method].model_dump_json())
            print(f"{method}: {time.perf_counter() - began:.0f} s", flush=True)
    choices = {("all", 1.0): SeenByHeads({}, 0, 1)}
    for share in options.shares:
        for method in options.methods:
            one = Streaming(scores=scores[method], full=share)
            choices[method, share] = SeenByHeads(one.kept(), one.sinks, one.window)
    rows = []
    for length in options.lengths:
        texts = [
            hide(tokenizer, straw, length, seed, options.keys) for seed in range(options.texts)
        ]
        whole = 0
        for (method, share), seen in choices.items():
            began, right = time.perf_counter(), []
            with attending(model, StreamingAttention(seen)):
                for text in texts:
                    right += found(model, text)
            whole = sum(right) if method == "all" else whole
            ratio = sum(right) / whole if whole else float("nan")
            marks = "".join("x" if one else "." for one in right)
            rows.append([length, method, share, sum(right), len(right), ratio, marks])
            print(rows[-1], f"{time.perf_counter() - began:.0f} s", flush=True)
    columns = ["tokens", "heads by", "full", "found", "of", "of the model's", "by place"]
    report("pass keys", columns, rows, {"rows": rows}, options.json)


def by_chance(like: HeadScores) -> HeadScores:
    """Random scores of the same heads."""
    random = np.random.default_rng(0)
    layers = tuple(tuple(random.random(len(row)).tolist()) for row in like.layers)
    return like.model_copy(update={"layers": layers})


if __name__ == "__main__":
    main()
