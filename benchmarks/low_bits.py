"""Ways to make few bits of a model: bytes, perplexity, KL and time of each, on two texts.

Judged on what no way has seen: documentation of Python's standard library behind its first 512
tokens, and the gates' own prose. The weights are judged without lowering them (`cetane sweep`'s
judge); all but the head's get the format, the head int8.

    python benchmarks/low_bits.py MODEL --bits 4 3 2 --methods plain weighted gptq
    python benchmarks/low_bits.py MODEL --bits 4 --methods tuned --minutes 15
"""

import itertools
import resource
import sys
import time

from cetane.checkpoint import open_checkpoint
from cetane.compress import Selection
from cetane.gates.compressions import Judge, Window
from cetane.gates.probes import texts
from cetane.pipeline.choose import resolve_recipe
from cetane.pipeline.request import FORMATS
from cetane.planner import Planner, turned
from cetane.schema.recipe import Recipe, load_recipe, override
from common import arguments, report, standard_library_text

SKIPPED = 512
"""Tokens of the documentation that a sweep calibrates on."""


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--bits", type=int, nargs="+", default=[4])
    parser.add_argument("--formats", nargs="+", default=[], help="In place of those of --bits.")
    parser.add_argument("--methods", nargs="+", default=["plain", "gptq"])
    parser.add_argument("--rotate", action="store_true", help="Turn the channels first.")
    parser.add_argument("--minutes", type=float, default=30.0, help="For tuning.")
    parser.add_argument("--tokens", type=int, default=1024, help="Of each text.")
    options = parser.parse_args()
    base = override(load_recipe("default"), {"cache.context": 512, "embedding.format": "int8"})
    base = override(base, {"compression.rotate": options.rotate})
    checkpoint = turned(open_checkpoint(options.model), base)
    judge = Judge(checkpoint, base)
    tokens = checkpoint.tokenizer.encode
    passages = {
        "documentation": tokens(standard_library_text().read_text())[SKIPPED:][: options.tokens],
        "prose": tokens(texts())[: options.tokens],
    }
    truth: dict[str, list[Window]] = {n: list(judge.read(t)) for n, t in passages.items()}

    def progress(what: str, done: int, total: int) -> None:
        print(f"{what} ({done}/{total})", file=sys.stderr)

    rows, result = [], []
    formats = options.formats or [FORMATS[bits] for bits in options.bits]
    for form, method in itertools.product(formats, options.methods):
        wanted = override(base, {"compression.default": form, "compression.method": method,
                                 "compression.minutes": options.minutes})  # fmt: skip
        started = time.perf_counter()
        recipe = resolve_recipe(checkpoint, wanted, progress)
        seconds = time.perf_counter() - started
        judge.compress(recipe.compression)
        size, bits = size_of(judge.planner, recipe), body_bits(judge.planner, recipe.compression)
        for name, windows in truth.items():
            found = judge.compare(windows)
            row = {
                "format": form, "method": method, "turned": options.rotate, "bits": bits,
                "bytes": size, "text": name,
                "fp16": found.reference, "perplexity": found.perplexity,
                "ratio": found.perplexity / found.reference, "kl": found.kl, "top1": found.top1,
                "seconds": seconds,
            }  # fmt: skip
            print(row, file=sys.stderr)
            result.append(row)
            rows.append(list(row.values()))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    title = f"few bits of {checkpoint.source}; peak {peak:.1f} GB"
    report(title, list(result[0]), rows, {"rows": result, "peak_gb": peak}, options.json)


def size_of(planner: Planner, recipe: Recipe) -> int:
    """Bytes of all weights."""
    return Planner(planner.checkpoint, recipe, planner).plan().weight_bytes


def body_bits(planner: Planner, compression: Selection) -> float:
    """Bits a weight, palettes and scales counted, of all but the head's."""
    weights = [w for b in planner.model.layers for _, w in b.weights() if w.kind]
    stored = sum(compression.format_for(w.name, str(w.kind)).nbytes(w.shape) for w in weights)
    return 8 * stored / sum(w.elements for w in weights)


if __name__ == "__main__":
    main()
