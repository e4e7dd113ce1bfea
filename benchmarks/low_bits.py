"""Ways to make few bits of a model: bytes, perplexity, KL, answers and time of each, on two texts.

Judged on what no way has seen: documentation of Python's standard library behind its first 512
tokens, and the gates' own prose. The weights are judged without lowering them (`cetane sweep`'s
judge). All but the head's get the format, the head int8. coremltools' own ways
(`coremltools_bits.py`) make values of the same format, and the same judge reads them.

A method with `turned-` before it turns the channels first. One with `mixed-` gives each part of the
layers the palettes of least predicted KL, of 0.1 bits a weight more. One with `quick-` takes
`second_order.effort = "quick"`.

    python benchmarks/low_bits.py MODEL --bits 4 3 2 --methods plain turned-gptq coreml-skm
    python benchmarks/low_bits.py MODEL --bits 4 --methods mixed-turned-tuned --minutes 15
"""

import itertools
import resource
import sys
import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from cetane.checkpoint import Checkpoint, open_checkpoint
from cetane.compress import Selection, parse_format
from cetane.gates.compressions import Judge
from cetane.gates.probes import texts
from cetane.hardware.memory import give_back
from cetane.pipeline.compression_choice import resolve_recipe
from cetane.pipeline.fitted_mixes import NEAR, FittedMixes
from cetane.pipeline.request import FORMAT_OF_BITS
from cetane.planner import Planner
from cetane.schema.changes import override
from cetane.schema.recipe import Recipe, load_recipe
from cetane.sweeps import smoke
from cetane.sweeps.basis import Basis
from common import WORK, arguments, report, standard_library_text
from coremltools_bits import GPTQ_FORMAT, METHODS, Theirs, put

SKIPPED = 512
"""Tokens of the documentation that a sweep calibrates on."""
MIXED, TURNED, QUICK = "mixed-", "turned-", "quick-"


@dataclass(frozen=True)
class Made:
    """What a method made, and in how many seconds."""

    recipe: Recipe
    tensors: dict[str, Tensor] | None
    """Of coremltools' ways: their values."""
    seconds: float

    def give(self, judge: Judge) -> None:
        """Let a judge's model compute with it."""
        if self.tensors is None:
            judge.compress(self.recipe.compression)
        else:
            put(judge, self.tensors, self.recipe.compression)


class Bench:
    """One model, in both bases of its channels, and what coremltools makes of it."""

    def __init__(self, model: str, minutes: float) -> None:
        self.minutes = minutes
        self.checkpoint = open_checkpoint(model)
        kept = {"cache.context": 512, "embedding.format": "int8", "compression.default": "fp16"}
        self.recipe = override(load_recipe("default"), kept)

    @cached_property
    def own(self) -> Basis:
        return Basis(self.checkpoint, self.recipe, progress)

    @cached_property
    def turned(self) -> Basis:
        recipe = override(self.recipe, {"compression.rotate": True})
        return Basis(self.checkpoint, recipe, progress)

    def basis(self, method: str) -> Basis:
        """The basis of a method."""
        return self.turned if TURNED in method else self.own

    def release(self) -> None:
        """Give back the memory of weights and of results: the logits of 3,300 tokens of Gemma take
        3.5 GB, and fitting loads the model once more."""
        for name in ("own", "turned"):
            if basis := vars(self).get(name):
                basis.release()
                basis.read.clear()
        give_back()

    @cached_property
    def theirs(self) -> Theirs:
        planner = self.own.planner
        body = {w.name for b in planner.model.layers for _, w in b.weights() if w.kind}
        return Theirs(self.checkpoint, planner, body, WORK)

    def made(self, form: str, method: str) -> Made:
        """What a method makes of the weights."""
        self.release()
        recipe = override(
            self.basis(method).recipe,
            {
                "compression.default": form,
                "compression.minutes": self.minutes,
                "compression.second_order.effort": "quick" if QUICK in method else "whole",
            },
        )
        theirs = self.theirs if method in METHODS else None  # its text counts for no way of theirs
        started = time.perf_counter()
        tensors = None
        if theirs is not None:
            tensors = theirs.made(method, form)
        else:
            checkpoint, wanted = self.basis(method).checkpoint, method.rpartition("-")[2]
            if MIXED in method:
                recipe = mixed(checkpoint, recipe)
            recipe = resolve_recipe(
                checkpoint, override(recipe, {"compression.method": wanted}), progress
            )
        return Made(recipe, tensors, time.perf_counter() - started)


def mixed(checkpoint: Checkpoint, recipe: Recipe) -> Recipe:
    """A recipe with the names of a mix, and nothing fitted yet."""
    rounded = resolve_recipe(checkpoint, override(recipe, {"compression.method": "gptq"}), progress)
    form = rounded.compression.default
    mix = FittedMixes(Planner(checkpoint, rounded)).best(parse_format(form).bits + NEAR)
    print(mix and mix.described(form), file=sys.stderr)
    return recipe if mix is None else mix.given(recipe)


def progress(what: str, done: int, total: int) -> None:
    print(f"{what} ({done}/{total})", file=sys.stderr)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--bits", type=int, nargs="+", default=[4])
    parser.add_argument("--formats", nargs="+", default=[], help="In place of those of --bits.")
    parser.add_argument("--methods", nargs="+", default=["plain", "turned-gptq"])
    parser.add_argument("--minutes", type=float, default=30.0, help="For tuning.")
    parser.add_argument("--tokens", type=int, default=1024, help="Of each text.")
    options = parser.parse_args()
    bench = Bench(options.model, options.minutes)
    tokens = bench.checkpoint.tokenizer.encode
    passages = {
        "documentation": tokens(standard_library_text().read_text())[SKIPPED:][: options.tokens],
        "prose": tokens(texts())[: options.tokens],
    }
    rows, result = [], []
    formats = options.formats or [FORMAT_OF_BITS[bits] for bits in options.bits]
    for form, method in itertools.product(formats, options.methods):
        if method == "coreml-gptq":
            if parse_format(form).bits != parse_format(GPTQ_FORMAT).bits:
                continue  # it has 4 and 8 bits alone
            form = GPTQ_FORMAT
        basis, made = bench.basis(method), bench.made(form, method)
        recipe = made.recipe
        truth = {name: basis.truth(passage) for name, passage in passages.items()}
        before = basis.answers
        made.give(basis.judge)
        size, bits = size_of(basis.planner, recipe), body_bits(basis.planner, recipe.compression)
        answers = smoke.compare(bench.checkpoint.tokenizer, smoke.ask(basis.judge), before)
        for name, windows in truth.items():
            found = basis.judge.compare(windows)
            row: dict[str, Any] = {
                "format": form, "method": method, "bits": bits, "bytes": size, "text": name,
                "fp16": found.reference, "perplexity": found.perplexity,
                "ratio": found.perplexity / found.reference, "kl": found.kl, "top1": found.top1,
                "smoke": sum(answer.expected or 0 for answer in answers), "seconds": made.seconds,
            }  # fmt: skip
            print(row, file=sys.stderr)
            result.append(row | {"answers": [answer.text for answer in answers]})
            rows.append(list(row.values()))
        for answer in answers:
            print(f"{answer.id}: {' '.join(answer.text.split())}", file=sys.stderr)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    title = f"few bits of {bench.checkpoint.source}; peak {peak:.1f} GB"
    report(title, list(row), rows, {"rows": result, "peak_gb": peak}, options.json)


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
