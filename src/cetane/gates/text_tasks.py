"""Tasks of text by which a port is judged as it ships: windows, and starts of a prompt."""

from collections.abc import Sequence

from cetane.checkpoint import Tokenizer
from cetane.gates.limits import limits
from cetane.gates.observe import ProbeTask, whole_calls
from cetane.gates.probes import LEAST_OWN, Probe, ProbePart, begun, widest_mode
from cetane.schema.plan import Plan


def first_positions(plan: Plan) -> int:
    """The positions that are judged first. Streaming heads need a text beyond what they see."""
    evidence = limits().evidence
    return evidence.positions if plan.recipe.cache.streaming is None else evidence.most


def window_tasks(plan: Plan, windows: Sequence[Probe]) -> list[ProbeTask]:
    """A task for each window. The widest mode reads all but the last tokens, and `decode` reads
    these. Otherwise no call of a short window would read a cache."""
    mode, tasks = widest_mode(plan), []
    for window in windows:
        last = min(LEAST_OWN, len(window.tokens) // 2)
        read = ProbePart(mode, len(window.tokens) - last), ProbePart("decode", last)
        tasks.append(ProbeTask(mode, window, read))
    return tasks


def start_tasks(plan: Plan, tokenizer: Tokenizer, peak: int) -> list[ProbeTask]:
    """Starts of a prompt in every mode, by `whole_calls`. They hold BOS and the text that ends with
    its token `peak`."""
    return whole_calls(plan, "start", lambda count: begun(tokenizer, count, up_to=peak))


def capacity_of(plan: Plan, probe: Probe) -> int | None:
    """The smallest capacity that holds a probe; None if the plan has only one."""
    stop = probe.start + len(probe.tokens)
    fitting = (one.tokens for one in plan.capacities if one.tokens >= stop)
    return next(fitting) if plan.smaller else None
