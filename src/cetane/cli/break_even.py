"""cetane break-even: whether a verifier pays, from measured milliseconds."""

from typing import Annotated

import typer

from cetane.cli.options import Json
from cetane.cli.output import facts, print_json


def break_even(
    t1: Annotated[float, typer.Option("--t1", help="Milliseconds of a plain decode step.")],
    tv: Annotated[float, typer.Option("--tv", help="Milliseconds of a verifying call.")],
    k: Annotated[int, typer.Option("--k", help="Tokens of that call: the last and K - 1 drafts.")],
    draft: Annotated[
        float, typer.Option(help="Milliseconds of drafting K - 1 tokens, and of other host work.")
    ] = 0.0,
    json: Json = False,
) -> None:
    """Tell how many drafts must be right to gain time.

    You give the milliseconds of a plain step and of a verifying call of K tokens.
    """
    from cetane.perf.breakeven import DraftingTimes, per_slot_formula

    times = DraftingTimes(t1, tv, k, draft)
    share, chance = times.break_even_share(), times.break_even_chance()
    formula = per_slot_formula(t1, tv, k)
    if json:
        print_json(
            {
                "t1_ms": t1, "tv_ms": tv, "k": k, "draft_ms": draft, "slowdown": times.slowdown,
                "pays": times.feasible, "ceiling": times.ceiling, "share": share, "chance": chance,
                "per_slot_formula": formula,
            }
        )  # fmt: skip
        return
    pays = "no acceptance pays: a call gives at most K tokens"
    facts(
        {
            "a call costs": f"{times.slowdown:.2f} plain steps",
            "it pays from": pays if share is None else f"{share:.1%} of drafted tokens accepted",
            "that is": None if chance is None else f"a chance of {chance:.1%} for each next token",
            "at best": f"{times.ceiling:.2f} times plain decoding, if all drafts are right",
            "1 - t1 / (tv / K)": None
            if formula < 0
            else f"{formula:.1%}, which ane-book calls break-even; it ignores acceptance",
        }
    )
