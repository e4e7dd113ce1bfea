"""Measures of speculative decoding with an arm's drafter, against plain decoding of its bundle."""

from collections.abc import Callable
from functools import partial

from cetane.engine.sampling import Sampler
from cetane.errors import CetaneError
from cetane.lab.journal import Figure
from cetane.lab.sides import Findings, Side, figure, measure_of_side
from cetane.pipeline.draft_head import train_draft_head
from cetane.pipeline.draft_head_result import DraftHeadSettings
from cetane.schema.draft_head import KINDS, DraftHeadKind, Training
from cetane.speculate.bench import Trial, compare
from cetane.speculate.first_tokens import first_tokens_by_turn
from cetane.speculate.open import DrafterOptions, call_times, longest_draft, open_drafters

TRAINING = DraftHeadSettings(minutes=10)
"""The training of an experiment's draft head, on chats that its model writes: minutes, not days."""


@measure_of_side("drafting")
def drafting(side: Side) -> Findings:
    """Acceptance and speed over the workload's prompts; empty for an arm without a drafter."""
    if not side.arm.drafter:
        return Findings()
    options, workload = DrafterOptions(side.arm.drafter), side.workload.spec
    make = partial(open_drafters, options, side.bundle, Sampler(), "auto", remember=False)
    if options.drafter in KINDS:
        ensure_head(side, make)
    longest = longest_draft(options, side.engine)
    room = side.recipe.cache.context - workload.new_tokens - 1 - longest
    prompts = [ids[:room] for ids in side.workload.prompts(side.bundle).values()]
    (speed,) = compare(
        Trial(side.engine, workload.new_tokens, side.bundle.tokenizer.eos_ids),
        {workload.prompts: prompts},
        {options.drafter: make},
        call_times(side.engine, longest),
        longest,
        workload.rounds,
        side.progress,
    )
    if speed.ratio is None:
        raise CetaneError(
            f"{workload.prompts}: every answer ends with its first token, so there is no speed",
            "name other prompts in the experiment's workload",
        )
    note = f"{options.drafter}, {speed.verifier_calls} verifying calls, {speed.fallbacks} plain"
    values = {
        "acceptance": speed.acceptance,
        "tokens_per_call": speed.tokens_per_call,
        "draft_speedup": speed.ratio,
        "draft_same": float(speed.same),
    }
    figures = {n: figure(n, v, n=len(prompts), note=note) for n, v in values.items()}
    for kind, head in side.bundle.draft_heads().items():
        if kind == options.drafter and head.manifest.training.positions:
            figures["head_top1"] = held_out(head.manifest.training)
    return Findings(figures)


@measure_of_side("turns")
def turns(side: Side) -> Findings:
    """What an arm's drafter knows of the answers in conversations. Tries keep earlier answers."""
    if not side.arm.drafter:
        return Findings()
    options = DrafterOptions(side.arm.drafter)
    drafters = open_drafters(options, side.bundle, Sampler(), "auto", remember=False)[:1]
    count = side.workload.spec.new_tokens
    asked = [
        one for (one,) in first_tokens_by_turn(side.engine, side.bundle.tokenizer, drafters, count)
    ]
    hits = [sum(one.proposed) / max(1, len(one.proposed)) for one in asked]
    right, proposed = sum(sum(one.right) for one in asked), sum(sum(one.proposed) for one in asked)
    by_turn = ", ".join(f"{share:.2f}" for share in hits)
    figures = {"turn_hits": figure("turn_hits", hits[-1], note=f"by turn: {by_turn}")}
    if proposed:
        figures["turn_right"] = figure("turn_right", right / proposed, n=proposed)
    return Findings(figures)


def held_out(training: Training) -> Figure:
    """A draft head's accuracy at every held-out token, also where a draft would not have paid."""
    places = ", ".join(f"{share:.3f}" for share in training.top1)
    return figure("head_top1", training.top1[0], n=training.positions, note=f"by place: {places}")


def ensure_head(side: Side, make: Callable[[], object]) -> None:
    """Train the bundle's draft head if it has none, even if the bundle's golden gate failed."""
    try:
        make()
    except CetaneError:
        side.progress(f"training {side.arm.drafter}", 0, 1)
        kind: DraftHeadKind = "medusa" if side.arm.drafter == "medusa" else "eagle3"
        train_draft_head(
            side.bundle.path, kind, [], settings=TRAINING, model=side.checkpoint.source,
            progress=side.progress,
        )  # fmt: skip
