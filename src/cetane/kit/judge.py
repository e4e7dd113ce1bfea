"""The device gate: what a Mac computed, against what cetane's executor expects in fp32."""

from collections.abc import Iterator, Mapping, Sequence
from math import inf, sqrt

from cetane.gates.limits import limits
from cetane.gates.verdict import Check, at_least, at_most
from cetane.kit.expectation import Expectation, uncompared
from cetane.kit.measurements import (
    Measurements,
    ProbePosition,
    RecordedBundle,
)
from cetane.schema.plan import Plan


def judge(
    measurements: Measurements, recorded: RecordedBundle, expected: Expectation, plan: Plan
) -> tuple[Check, ...]:
    """The checks of the device gate. A figure that is expected and was not recorded fails, and so
    does a function of which the kit compares nothing."""
    finished = at_least("finished", float(measurements.finished), 1.0)
    compared = at_most("functions without a compared output", len(uncompared(plan, expected)), 0)
    functions = function_checks(recorded, expected.functions)
    return (finished, compared, *functions, *probe_checks(recorded, expected.positions))


def function_checks(
    recorded: RecordedBundle, expected: Mapping[str, Sequence[str]]
) -> Iterator[Check]:
    """Checks that every function was called alone, and that its outputs are finite and near those
    expected, within fp16's limits."""
    made = {n: f.predict for n, f in recorded.functions.items() if f.predict and n in expected}
    yield at_least("called functions", len(made), len(expected))
    finite = sum(one.finite for one in made.values())
    yield at_least("finite functions, share", finite / max(len(made), 1), 1.0)
    errors = [made[name].errors.get(output) for name in made for output in expected[name]]
    worst = max((inf if error is None else error for error in errors), default=0.0)
    # Two vectors of one length have this relative distance at the least cosine.
    distance = sqrt(2 * (1 - limits().fp16.hidden_cosine))
    yield at_most("largest error of an output", worst, distance)


def probe_checks(
    recorded: RecordedBundle, expected: Mapping[str, Sequence[int]]
) -> Iterator[Check]:
    """Checks that logits are finite and near those expected, within fp16's limits, and choose the
    same token wherever the choice is no tie."""
    ask = limits().fp16
    positions = [position for probe in recorded.probes.values() for position in probe]
    yield at_least("probed positions", len(positions), sum(map(len, expected.values())))
    if not positions:
        return
    count = len(positions)
    yield at_least("finite positions, share", sum(p.finite for p in positions) / count, 1.0)
    yield at_least("least logit cosine", min(p.cosine for p in positions), ask.logit_cosine)
    yield at_most("mean KL, nats", sum(p.kl for p in positions) / count, ask.kl)
    decided = [p for p in positions if p.margin >= limits().evidence.margin]
    same = sum(chosen(p) == p.expected for p in decided)
    yield at_least("same token where decided, share", same / max(len(decided), 1), 1.0)


def chosen(position: ProbePosition) -> int | None:
    """The token that the device would choose; None if its logits are not finite."""
    return position.top[0][0] if position.finite and position.top else None


def ties(positions: Sequence[ProbePosition]) -> int:
    """The number of positions whose two best tokens are too near to be judged."""
    return sum(position.margin < limits().evidence.margin for position in positions)
