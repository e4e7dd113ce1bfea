"""The golden gate's question of an ANE's arithmetic, of a model at a long context: as it ships, and
with the factor on attention's weights taken out. docs/explanation/precision.md has the figures.

    python benchmarks/ane_golden.py MODEL [--context 8192]
"""

import time
from unittest.mock import patch

from cetane.checkpoint import Checkpoint, open_checkpoint
from cetane.gates.golden import resident_bytes
from cetane.gates.port import packaged
from cetane.gates.rounding import Rounding, judge_rounding, late_rounding
from cetane.planner import Planner
from cetane.schema.recipe import Recipe, load_recipe, override
from common import arguments, bundle_of, report

COLUMNS = ["factor", "mode", "hidden cosine", "logit cosine", "KL", "red checks", "seconds"]


def judged(checkpoint: Checkpoint, recipe: Recipe) -> tuple[list[Rounding], float]:
    """The answers, and the seconds that the gate took for them."""
    bundle = bundle_of(checkpoint, recipe)
    planner = Planner(checkpoint, bundle.plan.recipe)
    started = time.perf_counter()
    port = packaged(bundle, planner, checkpoint)
    return late_rounding(port, resident_bytes(planner) // 4), time.perf_counter() - started


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--recipe", default="fp16")
    options = parser.parse_args()
    checkpoint = open_checkpoint(options.model)
    rows = []
    for factor in ("as shipped", "none"):
        changes = {
            "name": f"ane-{checkpoint.config['model_type']}-{options.context}-{factor[:2]}",
            "cache.context": options.context,
            "tokens.verify": 0,
        }
        recipe = override(load_recipe(options.recipe), changes)
        if factor == "none":
            with patch("cetane.families.layers.lift", lambda keys: 1.0):
                answers, seconds = judged(checkpoint, recipe)
        else:
            answers, seconds = judged(checkpoint, recipe)
        for one in answers:
            red = sum(not check.passed for check in judge_rounding("ane", [one]))
            rows.append([factor, one.mode, f"{one.hidden_cosine:.6f}", f"{one.logit_cosine:.6f}",
                         f"{one.kl:.6f}", red, seconds])  # fmt: skip
    report(f"ane at {options.context}", COLUMNS, rows, {"rows": rows}, options.json)


if __name__ == "__main__":
    main()
