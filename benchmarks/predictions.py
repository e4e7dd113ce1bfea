"""The tables of the pages about the cost model: rates, errors, and the answers to its questions.

`--write` puts them between the marks of those pages. `--evidence FILE` checks the rates that ship
against other measurements, files with the columns of those in src/cetane/data/evidence.
"""

import argparse
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from cetane.hardware.chips import find_chip, load_chips
from cetane.hardware.notch import on_notch
from cetane.lab.synthetic import SHAPES, Shapes
from cetane.perf.breakeven import DraftingTimes, per_slot_formula, tokens_per_call
from cetane.perf.coreml_llm import formats
from cetane.perf.cost import TERM_OF, Work, costs_of, load_fit, terms, total
from cetane.perf.evidence import load_evidence, read
from cetane.perf.fit import PredictedMeasurement, leave_one_group_out, predicted
from cetane.perf.measurement import Measurement
from cetane.perf.predict import Predictor, rates_of
from cetane.perf.shapes import Decoder, load_decoders
from cetane.planner import Planner
from cetane.schema.recipe import load_recipe, parse_recipe
from common import put_lines

TERMS = tuple(dict.fromkeys(TERM_OF.values()))
WORST = 16
"""The number of steps and parts in the table of the worst predictions."""
Rows = Iterable[Sequence[Any]]


def markdown(columns: Sequence[str], rows: Rows) -> str:
    lines = [f"| {' | '.join(columns)} |", f"| {' | '.join('---' for _ in columns)} |"]
    lines += [f"| {' | '.join(map(str, row))} |" for row in rows]
    return "\n".join(lines)


def percent(value: float) -> str:
    return f"{100 * value:+.1f} %"


def median(checked: Iterable[PredictedMeasurement]) -> str:
    values = [abs(c.error) for c in checked]
    return f"{100 * float(np.median(values)):.1f} %" if values else ""


def rates() -> str:
    rows = [
        [f"`{name}`", TERM_OF[name], f"{r.value:.4g} {r.unit}", f"{r.low:.4g} to {r.high:.4g}",
         r.kind, r.source]
        for name, r in rates_of(find_chip("m4-max")).items()
    ]  # fmt: skip
    columns = ["rate", "term", "value on an M4 Max", "one group left out", "kind", "source"]
    return markdown(columns, rows)


def errors() -> str:
    measurements, _ = load_evidence()
    inside = predicted(measurements, load_fit().rates)
    rows, steps = [], []
    for left in leave_one_group_out(measurements):
        mine = [c for c in left.predictions if c.measurement.kind == "step"]
        parts = [c for c in left.predictions if c.measurement.kind == "part"]
        known = [c for c in inside if c.measurement.group == left.group
                 and c.measurement.kind == "step"]  # fmt: skip
        worst = max(mine, key=lambda c: abs(c.error))
        mean = percent(float(np.mean([c.error for c in mine])))
        rows.append([left.group, len(mine), median(known), f"**{median(mine)}**", mean,
                     f"{percent(worst.error)} ({worst.measurement.what})",
                     median(parts)])  # fmt: skip
        steps += mine
    seen = [c for c in inside if c.measurement.kind == "step"]
    rows.append(["**all**", len(steps), median(seen), f"**{median(steps)}**", "", "", ""])
    columns = ["model / chip", "steps", "in the fit", "left out", "mean", "worst step", "parts"]
    return markdown(columns, rows)


def worst() -> str:
    measurements, _ = load_evidence()
    every = [c for left in leave_one_group_out(measurements) for c in left.predictions
             if c.measurement.kind in ("step", "part")]  # fmt: skip
    inside = {id(c.measurement): c for c in predicted(measurements, load_fit().rates)}
    every.sort(key=lambda c: -abs(c.error))
    rows = [
        [f"{c.measurement.file} {c.measurement.id}", c.measurement.model, c.measurement.kind,
         c.measurement.what, f"{c.measurement.ms:.1f}", f"{c.predicted:.1f}", percent(c.error),
         percent(inside[id(c.measurement)].error)]
        for c in every[:WORST]
    ]  # fmt: skip
    columns = ["row", "model", "kind", "what", "measured ms", "predicted ms", "left out",
               "in the fit"]  # fmt: skip
    return markdown(columns, rows)


def skipped() -> str:
    _, left = load_evidence()
    return markdown(
        ["row", "model", "layout", "why"],
        [[f"{s.file} {s.id}", s.model, s.what, s.why] for s in left],
    )


def others() -> str:
    measurements, _ = load_evidence()
    rows = [
        [f"{c.measurement.file} {c.measurement.id}", c.measurement.what,
         c.measurement.works[0].tokens,
         f"{c.measurement.ms:.1f}", f"{c.predicted:.1f}", percent(c.error)]
        for c in predicted(measurements, load_fit().rates)
        if c.measurement.kind in ("prefill", "verify")
    ]  # fmt: skip
    return markdown(["row", "what", "T", "measured ms", "predicted ms", "error"], rows)


def zaya() -> str:
    shapes, predictor = Shapes("zaya1-8b"), Predictor(find_chip("m4-max"))
    rows = []
    for name in ("zaya-int8", "zaya-int4", "zaya-routed"):
        planner = Planner(shapes, load_recipe(name))
        for mode, tokens in planner.recipe.tokens.by_mode().items():
            found = predictor.predict(planner, mode)
            spans = f"{found.low:.0f} to {found.high:.0f}"
            rows.append([f"`{name}`", mode, tokens, f"{found.ms:.1f}", spans, f"{found.tok_s:.1f}",
                         found.binds, *(f"{found.terms[t]:.1f}" for t in TERMS)])  # fmt: skip
    return markdown(["recipe", "mode", "T", "ms", "interval", "tok/s", "binds", *TERMS], rows)


def speedup(spec: DraftingTimes, chance: float) -> float:
    """The speed-up over plain decoding, if every drafted token is right with this chance."""
    return tokens_per_call(chance, spec.width) / spec.slowdown


def verifier() -> str:
    shapes, predictor = Shapes("zaya1-8b"), Predictor(find_chip("m4-max"))
    rows = []
    for name in ("zaya-int8", "zaya-int4", "zaya-routed"):
        for width in (2, 4, 8):
            content = load_recipe(name).model_dump()
            content["tokens"]["verify"] = width
            planner = Planner(shapes, parse_recipe(content, name))
            t1, tk = (predictor.predict(planner, mode).ms for mode in ("decode", "verify"))
            spec = DraftingTimes(t1, tk, width)
            share, chance = spec.break_even_share(), spec.break_even_chance()
            pays = ["never", "never"] if share is None else [f"{share:.2f}", f"{chance:.2f}"]
            rows.append([f"`{name}`", width, f"{t1:.1f}", f"{tk:.1f}", f"{spec.slowdown:.2f}",
                         *pays, f"{speedup(spec, 0.5):.2f}", f"{spec.ceiling:.2f}"])  # fmt: skip
    columns = ["recipe", "K", "t1", "tK", "tK/t1", "pays from share", "pays from chance",
               "speed-up at chance 0.5", "if all are right"]  # fmt: skip
    return markdown(columns, rows)


QWEN3 = {
    "model_type": "qwen3", "vocab_size": 151936, "num_hidden_layers": 36, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 40960,
}  # fmt: skip
DECODERS: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": {
        "model_type": "llama", "vocab_size": 49152, "num_hidden_layers": 30, "hidden_size": 576,
        "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3,
        "tie_word_embeddings": True, "max_position_embeddings": 8192,
    },
    "Gemma 4 E2B": SHAPES["gemma4-e2b"],
    "Qwen3-4B": QWEN3 | {
        "hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True,
    },
    "Qwen3-8B": QWEN3 | {
        "hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""Their config.json, as far as shapes depend on it."""
DRAFTED = (
    ("SmolLM2-135M", "a19-pro", "palette6-kmeans-group32", (4, 8, 16), ""),
    ("SmolLM2-135M", "m4-max", "palette6-kmeans-group32", (4, 8, 16), ""),
    ("Gemma 4 E2B", "a19-pro", "palette4-kmeans-group32", (4, 8),
     "K=3: 31.5 ms for 31.0 (CoreML-LLM)"),
    ("Qwen3-4B", "m4-pro", "palette6-kmeans-group16", (4, 8, 16),
     "K=16: 43 ms, 2.21x MLX with 3.3 tokens a call (mlx-ane-sd)"),
    ("Qwen3-4B", "m4-max", "fp16", (4, 8), "K=8 costs 1.00 to 1.01 times K=4 (Core AI, M5 Pro)"),
    ("Qwen3-8B", "m4-max", "fp16", (5, 8), "K=5: 1.05 t1, 2.28x (ANEForge, no chip named)"),
)  # fmt: skip
"""Model, chip, weights, columns of verifying calls, and what others measured on an ANE."""


def speculation() -> str:
    """Verifying calls of dense models, beside what was reported."""
    rows = []
    for model, chip, weights, widths, reported in DRAFTED:
        shapes, predictor = Shapes(model, DECODERS[model]), Predictor(find_chip(chip))
        for width in widths:
            content = load_recipe("default").model_dump()
            content["compression"] = {"default": weights}
            content["cache"]["context"] = 2048
            content["tokens"]["verify"] = width
            planner = Planner(shapes, parse_recipe(content, model))
            t1, tk = (predictor.predict(planner, mode).ms for mode in ("decode", "verify"))
            spec = DraftingTimes(t1, tk, width)
            share = spec.break_even_share()
            rows.append([model, weights, f"`{chip}`", width, f"{t1:.1f}", f"{tk:.1f}",
                         f"{spec.slowdown:.2f}", "never" if share is None else f"{share:.2f}",
                         *(f"{speedup(spec, chance):.2f}" for chance in (0.4, 0.6, 0.8)),
                         reported if width == widths[-1] else ""])  # fmt: skip
    columns = ["model", "weights", "chip", "K", "t1", "tK", "tK/t1", "pays from share",
               "speed-up at chance 0.4", "0.6", "0.8", "reported"]  # fmt: skip
    return markdown(columns, rows)


def gemma() -> str:
    model = load_decoders()["gemma4-e2b"]
    bits = formats("INT4 kmeans per_grouped_channel g32")
    rows = []
    costs, fit = costs_of(rates_of(find_chip("a19-pro"))), load_fit().errors
    for slots, chunks in product((2048, 8192), (4, 3)):
        cuts = model.chunks[chunks]
        kinds: dict[str, list[Work]] = {
            "full, in and out": model.chunked(cuts, slots, bits, "io"),
            "full, MLState": model.chunked(cuts, slots, bits, "stateful"),
            "WFA, 2048 slots": model.chunked(cuts, slots, bits, "io", full_slots=2048),
        }
        for kind, works in kinds.items():
            found = terms([*works, Work(calls=0, host=1)], costs)
            ms = total(found)
            binds = max(found, key=lambda term: found[term])
            spans = f"{ms * fit.low:.0f} to {ms * fit.high:.0f}"
            rows.append([slots, chunks, kind, f"{ms:.1f}", spans, f"{1000 / ms:.1f}", binds,
                         *(f"{found[t]:.1f}" for t in TERMS)])  # fmt: skip
    columns = ["context", "chunks", "caches", "ms", "interval", "tok/s", "binds", *TERMS]
    return markdown(columns, rows)


def matrices(model: Decoder) -> Iterable[tuple[int, int]]:
    """The shapes `(O, I)` of all weights, without per-layer embeddings."""
    yield model.vocab, model.hidden
    for index in range(model.layers):
        layer = model.layer(index)
        keys = model.kv_heads * layer.query // model.query_heads
        yield from ((layer.query, model.hidden), (model.hidden, layer.query))
        yield from [(keys, model.hidden)] * 2 * model.owns(index)
        inner = layer.mlp // 3 // model.hidden
        yield from ((inner, model.hidden), (inner, model.hidden), (model.hidden, inner))


def hit_bytes(shapes: Iterable[tuple[int, ...]], bits: int) -> float:
    """Bytes of the weights `(O, I, ...)` that are on the notch."""
    return sum(prod(s) * bits / 8 for s in shapes if on_notch(s[0], prod(s[1:]), bits))


def notch() -> str:
    """The cost of weights on the notch is no part of the fitted model: the evidence shows no such
    slowness for 4- and 8-bit weights of these shapes."""
    chip = find_chip("m4-max")
    slower = max(0.0, 1e-6 / chip.figure("notch").value - rates_of(chip)["half"].ms)
    rows = []
    shapes: dict[str, list[tuple[int, ...]]] = {
        name: list(matrices(model)) for name, model in load_decoders().items() if not model.experts
    }
    planner = Planner(Shapes("zaya1-8b"), load_recipe("zaya-int8"))
    dense = [w.shape for b in (*planner.model.layers, *planner.heads) for _, w in b.weights()
             if w.kind]  # fmt: skip
    shapes["ZAYA1-8B, dense, 3 head slices"] = list(dense)
    for name, weights in sorted(shapes.items()):
        whole = sum(2 * float(np.prod(shape)) for shape in weights)
        hit = hit_bytes(weights, 16)
        other = ", ".join(
            f"{bits:g} bit {100 * hit_bytes(weights, bits) / (whole * bits / 16):.0f} %"
            for bits in (8, 6, 4)
        )
        rows.append([name, f"{whole / 1e9:.2f} GB", f"{100 * hit / whole:.0f} %",
                     f"{hit * slower:.0f}", other])  # fmt: skip
    columns = ["model", "fp16", "hit in fp16", "cost of a step in fp16, ms",
               "hit, if fewer bits were"]  # fmt: skip
    return markdown(columns, rows)


PUBLISHED = {
    "experiment 32, as stated": DraftingTimes(130, 475, 4),
    "experiment 32, measured call": DraftingTimes(130.5, 524, 4),
    "experiment 34": DraftingTimes(112, 499, 4),
    "experiment 35": DraftingTimes(109, 483, 4),
    "Phi-4-mini, flexible shapes": DraftingTimes(56.2, 78, 4),
    "Gemma 4 E2B, A19 Pro (row 86; 3 columns, drafting 11 ms)": DraftingTimes(31.0, 31.5, 3, 11),
}


def breakeven() -> str:
    rows = []
    for name, spec in PUBLISHED.items():
        share, formula = spec.break_even_share(), per_slot_formula(spec.t1, spec.tv, spec.width)
        rows.append([name, spec.t1, spec.tv, spec.width, f"{spec.slowdown:.2f}",
                     "never" if share is None else f"{share:.2f}",
                     f"{formula:.2f}", f"{spec.ceiling:.2f}"])  # fmt: skip
    columns = ["case", "t1 ms", "tK ms", "K", "(tK + draft)/t1", "pays from",
               "1 - t1/(tK/K)", "speed-up if all are right"]  # fmt: skip
    return markdown(columns, rows)


def chips() -> str:
    rows = []
    for chip in load_chips().values():
        cells = []
        for name in ("stream", "compute", "program_bytes"):
            figure = chip.figure(name)
            cells.append(f"{figure.value:g}" + (f" (of {figure.of})" if figure.of else ""))
        rows.append([f"`{chip.id}`", *cells, "yes" if chip.devices else "no"])
    columns = ["chip", "stream GB/s", "fp16 peak TFLOP/s", "program bytes", "has measurements"]
    return markdown(columns, rows)


SECTIONS: dict[Path, tuple[Callable[[], str], ...]] = {
    Path("docs/explanation/cost-model.md"): (rates, chips, notch, breakeven),
    Path("docs/reference/predictions.md"): (
        errors, worst, skipped, others, zaya, verifier, speculation, gemma,
    ),
}  # fmt: skip
"""The functions that make the tables of each page. A table's mark has its function's name."""


def renew() -> None:
    """Renew the tables of the pages."""
    for page, sections in SECTIONS.items():
        for section in sections:
            put_lines(page, section.__name__, section().splitlines())


def unseen(paths: list[Path]) -> None:
    """Errors of other measurements, with the rates that ship."""
    measurements, left = read(paths)
    checked = predicted(measurements, load_fit().rates)
    for c in checked:
        m: Measurement = c.measurement
        print(f"{m.id:>6} {m.kind:7} {m.group:36} {m.what[:44]:44} {m.ms:8.2f} measured "
              f"{c.predicted:8.2f} predicted {percent(c.error)}")  # fmt: skip
    for s in left:
        print(f"{s.id:>6} left out {s.model}: {s.what}: {s.why}")
    print(
        f"steps: median absolute error {median(c for c in checked if c.measurement.kind == 'step')}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="renew the tables of the pages")
    parser.add_argument("--evidence", type=Path, nargs="+", help="check other measurements")
    options = parser.parse_args()
    if options.evidence:
        unseen(options.evidence)
    elif options.write:
        renew()
    else:
        for sections in SECTIONS.values():
            for section in sections:
                print(f"\n## {section.__name__}\n\n{section()}")


if __name__ == "__main__":
    main()
