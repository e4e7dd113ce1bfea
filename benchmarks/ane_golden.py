"""The golden gate's question of an ANE's arithmetic, of a model at a long context: as it ships, and
with the factor on attention's weights taken out. docs/explanation/precision.md has the figures.

    python benchmarks/ane_golden.py MODEL [--context 8192]
"""

import time
from unittest.mock import patch

from cetane.checkpoint import Checkpoint, open_checkpoint
from cetane.gates.port import Packaged, packaged
from cetane.gates.rounding import LateCalls, judge_rounding
from cetane.planner import Planner
from cetane.planner.weights import weight_count
from cetane.schema.changes import override
from cetane.schema.recipe import Recipe, load_recipe
from common import arguments, bundle_of, report

COLUMNS = ["factor", "mode", "1 - hidden cosine", "1 - logit cosine", "KL", "red checks", "seconds"]


def port_of(checkpoint: Checkpoint, recipe: Recipe) -> Packaged:
    """The port of a recipe, built if it is not there."""
    bundle = bundle_of(checkpoint, recipe)
    return packaged(bundle, Planner(checkpoint, bundle.plan.recipe), checkpoint)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--recipe", default="fp16")
    options = parser.parse_args()
    checkpoint = open_checkpoint(options.model)
    name = f"ane-{checkpoint.config['model_type']}-{options.context}"
    changes = {"name": name, "cache.context": options.context, "tokens.verify": 0}
    recipe = override(load_recipe(options.recipe), changes)
    shipped = port_of(checkpoint, recipe)
    with patch("cetane.families.grouped_query.lift", lambda keys: 1.0):
        bare = port_of(checkpoint, override(recipe, {"name": f"{name}-bare"}))
    started = time.perf_counter()
    weights, rows = weight_count(shipped.planner.blocks), []
    for factor, port in (("as shipped", shipped), ("none", bare)):
        for one in LateCalls(port, weights, options.context).loss():
            red = sum(not check.passed for check in judge_rounding("ane", [one]))
            cosines = [f"{1 - cosine:.3g}" for cosine in (one.hidden_cosine, one.logit_cosine)]
            rows.append([factor, one.mode, *cosines, f"{one.kl:.3g}", red,
                         time.perf_counter() - started])  # fmt: skip
        report(f"ane at {options.context}", COLUMNS, rows, {"rows": rows}, options.json)


if __name__ == "__main__":
    main()
