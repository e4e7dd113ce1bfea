"""The golden gate of a finished bundle: run, kept in the bundle, and explained where it is red."""

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint
from cetane.files import Progress, silent
from cetane.gates.explain import Explanation, explain
from cetane.gates.golden import golden as compare_with_model
from cetane.gates.golden_result import GoldenResult
from cetane.pipeline.origin import with_origin
from cetane.pipeline.port_result import gate_json


def judge(
    bundle: Bundle, checkpoint: Checkpoint, progress: Progress = silent
) -> tuple[GoldenResult, Explanation | None]:
    """Run the golden gate, keep its result in the bundle, and say why it is red if it is."""
    result = compare_with_model(
        bundle, checkpoint, lambda what, done, total: progress(f"golden gate: {what}", done, total)
    )
    result = with_origin(result, bundle, checkpoint)
    bundle.write_gate("golden", gate_json(result))
    if not result.passed:
        progress("golden gate: what is wrong", 0, 1)
    return result, explain(bundle, checkpoint, result)
