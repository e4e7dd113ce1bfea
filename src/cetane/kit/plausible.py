"""Whether a record can be of a bundle at all, and whether any chip could be so fast.

A record that cannot is refused before it is judged: it was changed, or is of other programs.
"""

from collections.abc import Mapping, Sequence

from cetane.bundle import Bundle
from cetane.errors import CetaneError
from cetane.hardware.chips import Chip
from cetane.kit.expectation import Expectation
from cetane.kit.measurements import (
    MeasuredTurn,
    Measurements,
    RecordedBundle,
    Spread,
)
from cetane.mil.program import Program
from cetane.schema.function import Route, Step
from cetane.schema.plan import Plan
from cetane.schema.recipe import Mode

BEYOND = 10
"""The largest multiple of a chip's published rate at which a program may read its weights."""
SLOWER = 10
"""The largest multiple of the time of a step or a prompt that its functions may take alone."""
FASTEST = 2000.0
"""GB/s, for a chip without a published rate."""
KNOWN_OPS = 0.5
"""The least share of a plan's ops that the function must have. Core ML renames some of them."""


def check_origin(
    recorded: RecordedBundle,
    bundle: Bundle,
    programs: Mapping[str, Program],
    expected: Expectation,
) -> None:
    """Raise CetaneError if a record is not of this bundle's functions and probes."""
    plan = bundle.plan
    for name, function in recorded.functions.items():
        where = f"measurements of {name}"
        key = (function.shard, function.function)
        if key not in plan.functions or name != "/".join(key):
            raise CetaneError(f"{where}: the bundle has no such function")
        if function.tokens != plan.functions[key].tokens:
            raise CetaneError(f"{where}: of {function.tokens} tokens, not of the bundle's function")
        if function.plan:
            own = {value.name for op in programs[key[0]].functions[key[1]].ops
                   for value in op.outputs}  # fmt: skip
            named = [op.output for op in function.plan if op.output]
            if sum(output in own for output in named) < KNOWN_OPS * len(named):
                raise CetaneError(f"{where}: its plan names ops that the function does not have")
    for name, positions in recorded.probes.items():
        if tuple(position.expected for position in positions) != expected.positions.get(name):
            raise CetaneError(f"the probe {name} expects other tokens than this bundle's")
        ids = [token for position in positions for token, _ in position.top]
        if any(token >= plan.vocab for token in ids):
            raise CetaneError(f"the probe {name} names a token beyond the vocabulary")


def check_reason(
    measurements: Measurements, recorded: RecordedBundle, plan: Plan, chip: Chip | None
) -> None:
    """Raise CetaneError for times in which no chip could read the weights, and for turns that are
    quicker than the functions that they call."""
    check_speeds(recorded, plan, chip)
    label = measurements.label(recorded.digest)
    check_turns([turn for turn in measurements.turns if turn.bundle == label], recorded, plan)


def check_speeds(recorded: RecordedBundle, plan: Plan, chip: Chip | None) -> None:
    """Raise CetaneError for a function that read its weights quicker than a chip can. Of a shard
    with experts, no function reads all weights."""
    rate = BEYOND * chip.figure("stream").value if chip and chip.stream else FASTEST
    steps = [step for mode in plan.modes.values() for step in (*mode.steps, *mode.silent)]
    routed = {step.shard for step in steps if isinstance(step, Route)}
    for name, function in recorded.functions.items():
        if function.predict is None or function.shard in routed:
            continue
        parts = sum(f.tokens == function.tokens for f in plan.by_name[function.shard].functions)
        size = plan.by_name[function.shard].weight_bytes / max(parts, 1)
        speed = size / 1e6 / function.predict.min_ms
        if speed > rate:
            raise CetaneError(
                f"{name}: {function.predict.min_ms:g} ms for {size / 1e6:,.0f} MB of weights would "
                f"be {speed:,.0f} GB/s, beyond reason",
                "measure again",
            )


def check_turns(turns: Sequence[MeasuredTurn], recorded: RecordedBundle, plan: Plan) -> None:
    """Raise CetaneError for a turn with tokens or calls that the bundle does not have.

    So it does for a turn that takes far less time than the functions that it calls.
    """
    alone = {mode: alone_ms(recorded, steps.steps) for mode, steps in plan.modes.items()}
    reading = reading_ms(recorded, plan)
    for turn in turns:
        check_calls(turn, plan)
        spreads: dict[Mode, Spread | None] = {"decode": turn.decode, "verify": turn.verify}
        for mode, spread in spreads.items():
            if spread is not None:
                check_time(f"turn {turn.turn}: a {mode} step", spread.p95_ms, alone.get(mode, 0))
        read = turn.prompt_tokens * reading
        check_time(f"turn {turn.turn}: the prompt", turn.first_token_ms, read)


def check_calls(turn: MeasuredTurn, plan: Plan) -> None:
    """Raise CetaneError for a turn with a token that the model lacks, a prompt beyond the context,
    or verifying calls that are not as wide as the bundle's."""
    context = plan.recipe.cache.context
    width = plan.modes["verify"].tokens if "verify" in plan.modes else None
    for wrong, what in (
        (any(token >= plan.vocab for token in turn.tokens), "gave a token beyond the vocabulary"),
        (turn.prompt_tokens > context,
         f"read {turn.prompt_tokens:,} tokens, and the bundle's context has {context:,}"),
        (turn.verify_tokens not in (None, width),
         f"has verifying calls of {turn.verify_tokens} tokens, and the bundle none of that width"),
    ):  # fmt: skip
        if wrong:
            raise CetaneError(f"turn {turn.turn} {what}")


def check_time(what: str, ms: float, alone: float) -> None:
    """Raise CetaneError for a time that is far below that of its functions alone."""
    if alone > SLOWER * ms:
        raise CetaneError(
            f"{what} takes {ms:g} ms, and its functions alone {alone:g} ms", "measure again"
        )


def reading_ms(recorded: RecordedBundle, plan: Plan) -> float:
    """The least milliseconds in which functions read a token of a prompt, each alone."""
    modes = (plan.modes[name] for name in plan.plain_modes)
    return min(alone_ms(recorded, mode.steps) / mode.tokens for mode in modes)


def alone_ms(recorded: RecordedBundle, steps: Sequence[Step | Route]) -> float:
    """The least milliseconds of the functions that every such step calls, each alone. Functions
    without a time count nothing."""
    functions = [
        recorded.functions.get(f"{step.shard}/{step.function}")
        for step in steps
        if isinstance(step, Step)
    ]
    return sum(f.predict.min_ms for f in functions if f is not None and f.predict is not None)
