"""What a bundle's drafts would gain on an ANE: steps counted here, times by the cost model.

On an ANE a verifying call costs about a plain step, so every draft is verified, also where it would
not pay on this machine. Counted: tokens, steps, and calls of the draft head over the prompts of the
speculative suite. Predicted: a plain step, a verifying call, and a call of the draft head. The last
is a dispatch and a read of its weights.

    python benchmarks/predicted_gain.py BUNDLE [--chips a19-pro m4-max] [--drafters union auto]
"""

import json
from pathlib import Path
from typing import Any

from cetane.bundle import Bundle
from cetane.engine.open import open_engine
from cetane.engine.sampling import Sampler
from cetane.gates.probes import asked
from cetane.hardware.chips import find_chip
from cetane.perf.cost import Work, terms, total
from cetane.perf.predict import Predictor
from cetane.pipeline.origin import checkpoint_of
from cetane.planner import Planner
from cetane.prompts import suite
from cetane.schema.function import Function
from cetane.speculate.bench import Trial
from cetane.speculate.draft_heads.drafter import DraftHeadDrafter
from cetane.speculate.draft_heads.runner import DraftHeadRunner
from cetane.speculate.open import DrafterOptions, longest_draft, open_drafters
from cetane.speculate.speculator import Speculator
from common import arguments, report


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--chips", nargs="+", default=["a19-pro", "m4-max"])
    parser.add_argument("--drafters", nargs="+", default=["union", "auto"])
    parser.add_argument("--only", help="categories, separated by commas")
    parser.add_argument("--tokens", type=int, default=96, help="most tokens of an answer")
    options = parser.parse_args()
    bundle = Bundle(Path(options.model))
    wanted = options.only.split(",") if options.only else list(suite())
    done = {
        (name, category): steps(bundle, name, category, options.tokens)
        for name in options.drafters
        for category in wanted
    }
    rows = []
    for chip in options.chips:
        t1, tk, drafting = milliseconds(bundle, chip)
        for (name, category), (tokens, plain, calls, drafts) in done.items():
            ms = plain * t1 + calls * tk + drafts * drafting
            rows.append([chip, name, category, tokens, plain, calls, drafts, t1, tk, drafting,
                         tokens * t1 / ms])  # fmt: skip
    columns = ["chip", "drafter", "prompts", "tokens", "plain steps", "verifying calls",
               "calls of the head", "t1 ms", "tK ms", "head ms", "predicted gain"]  # fmt: skip
    report("predicted gain", columns, rows, {"rows": rows}, options.json)


def steps(bundle: Bundle, name: str, category: str, most: int) -> tuple[int, int, int, int]:
    """Tokens after the first of each answer, plain steps, verifying calls, calls of the head."""
    engine, chosen = open_engine(bundle), DrafterOptions(name)
    drafters = open_drafters(chosen, bundle, Sampler(), "auto", remember=False)
    heads = [counted(d.runner) for d in drafters if isinstance(d, DraftHeadDrafter)]
    speculator, tokens = Speculator(drafters, longest_draft(chosen, engine)), 0
    trial = Trial(engine, most, bundle.tokenizer.eos_ids)
    for text in suite()[category]:
        made = trial.take(asked(bundle.tokenizer, text), speculator)
        tokens += len(made.tokens) - 1
    counters = speculator.counters
    speculator.close()
    print(json.dumps([name, category, tokens, counters.summary()]), flush=True)
    return tokens, counters.fallbacks, counters.verifier_calls, sum(len(made) for made in heads)


def counted(runner: DraftHeadRunner) -> list[str]:
    """The names of the functions that a runner calls from now on."""
    called: list[str] = []
    call = runner.call

    def counting(function: Function, *inputs: Any, **rows: Any) -> Any:
        called.append(function.name)
        return call(function, *inputs, **rows)

    runner.call = counting  # type: ignore[method-assign]
    return called


def milliseconds(bundle: Bundle, chip: str) -> tuple[float, float, float]:
    """Predicted: a plain step, a verifying call, and a call of the best draft head."""
    predictor: Any = Predictor(find_chip(chip))
    planner = Planner(checkpoint_of(bundle), bundle.plan.recipe)
    t1, tk = (predictor.predict(planner, mode).ms for mode in ("decode", "verify"))
    heads = list(bundle.draft_heads().values())
    if not heads:
        return t1, tk, 0.0
    weights = {8.0: float(heads[-1].manifest.weight_bytes)}
    return t1, tk, total(terms([Work(weights=weights)], predictor.costs))


if __name__ == "__main__":
    main()
