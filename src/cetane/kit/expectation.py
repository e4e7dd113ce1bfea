"""What a kit expects of a bundle: the tokens of its probes, and the outputs that are compared."""

from collections.abc import Iterator, Mapping
from math import prod

from cetane.bundle import Bundle
from cetane.kit.example_calls import LARGEST_OUTPUT, ExampleCall, function_calls
from cetane.kit.probes import ExpectedProbe, expected_probes, judged_positions
from cetane.schema.function import Route
from cetane.schema.interface import FromCache, Output, ToCache, ToTensor
from cetane.schema.plan import Plan
from cetane.validation import Data, validated

GATE = "kit"
"""The name of the gate that keeps an `Expectation` with its bundle."""
Calls = dict[tuple[str, str], ExampleCall]


class Expectation(Data):
    """What a kit expects of a bundle, kept as a gate's result."""

    positions: dict[str, tuple[int, ...]]
    """The token of every judged position, by probe."""
    functions: dict[str, tuple[str, ...]]
    """The judged outputs of every measured function, as SHARD/FUNCTION."""


def expectation(plan: Plan, probes: list[ExpectedProbe], calls: Calls) -> Expectation:
    """What a bundle should compute. Its probes give the logits, and its calls the other outputs."""
    return Expectation(
        positions={one.probe.name: tuple(expected_tokens(one)) for one in probes},
        functions={"/".join(key): judged_outputs(plan, key, calls[key]) for key in sorted(calls)},
    )


def judged_outputs(plan: Plan, key: tuple[str, str], call: ExampleCall) -> tuple[str, ...]:
    """The outputs of a function that are compared: of those that an error can judge, all that its
    example call has."""
    return tuple(one.name for one in comparable(plan, key) if one.name in call.outputs)


def comparable(plan: Plan, key: tuple[str, str]) -> Iterator[Output]:
    """The outputs of a function that an error can judge, but for those too large for a kit.

    Scores of experts and whole numbers are left out, since a last bit can change them entirely.
    Probes judge what follows from them.
    """
    scores = {route.scores for route in routes(plan)}
    function = plan.functions[key]
    whole = {
        item.source.name
        for item in function.inputs
        if isinstance(item.source, FromCache) and item.dtype == "int8"
    }
    for item in function.outputs:
        scored = isinstance(item.sink, ToTensor) and item.sink.name in scores
        rounded = isinstance(item.sink, ToCache) and item.sink.name in whole
        if not scored and not rounded and prod(item.shape) <= LARGEST_OUTPUT:
            yield item


def experts(plan: Plan) -> set[tuple[str, str]]:
    """The functions that tokens choose. No token of a kit may have chosen some of them."""
    return {(r.shard, name) for r in routes(plan) for names in r.experts for name in names}


def is_complete(plan: Plan, expected: Expectation, positions: Mapping[str, int]) -> bool:
    """Whether an expectation judges so many positions of every probe, and of every function all
    that can be compared. An expert may have nothing, if no token chose it."""
    chosen = experts(plan)
    for key in plan.functions:
        outputs = expected.functions.get("/".join(key))
        if not outputs and key in chosen:
            continue
        if outputs is None or set(outputs) != {one.name for one in comparable(plan, key)}:
            return False
    return {name: len(own) for name, own in expected.positions.items()} == positions


def uncompared(plan: Plan, expected: Expectation) -> list[str]:
    """The functions, as SHARD/FUNCTION, of which nothing is compared, although it could be.

    Experts are not among them, since no token may have chosen them; nor are functions that have
    only outputs too large for a kit.
    """
    chosen = experts(plan)
    return [
        "/".join(key)
        for key in plan.functions
        if not expected.functions.get("/".join(key))
        and key not in chosen
        and any(comparable(plan, key))
    ]


def routes(plan: Plan) -> Iterator[Route]:
    """The choices of experts in all modes, at all capacities, with all adapters."""
    for capacity in plan.capacities:
        for modes in (capacity.modes, *capacity.adapters.values()):
            for mode in modes.values():
                yield from (step for step in (*mode.steps, *mode.silent) if isinstance(step, Route))


def expected_tokens(expected: ExpectedProbe) -> list[int]:
    """The expected token of every judged position."""
    return [int(token) for token in expected.logits.argmax(axis=1)]


def expected_of(bundle: Bundle) -> Expectation:
    """What a bundle should compute: as the kit's writer kept it, else computed again.

    No manifest lists the kept file. So one that leaves out a probe or an output is not used.
    Raises CetaneError for a kept file that is damaged.
    """
    kept = bundle.gates().get(GATE, {})
    if "functions" in kept:
        expected = validated(Expectation, kept, str(bundle.path))
        if is_complete(bundle.plan, expected, judged_positions(bundle)):
            return expected
    return expectation(bundle.plan, expected_probes(bundle), function_calls(bundle))
