"""cetane heads: finds the key/value heads that must see all tokens."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cetane.cli.options import Context, Json, Model, RecipeName
from cetane.cli.output import megabytes, print_json, progress, say, table

if TYPE_CHECKING:
    from cetane.pipeline.heads import HeadsResult

HOLDS = 0.95
"""A share of the heads holds recall if it finds at least this part of the keys that the whole model
finds. No share below one that fails counts: it may hold by chance."""


class MethodName(StrEnum):
    """The ways to score heads."""

    mass = "mass"
    gates = "gates"


def heads(
    model: Model,
    method: Annotated[
        MethodName, typer.Option(help="Attention on pass keys, or gates trained on them.")
    ] = MethodName.mass,
    tokens: Annotated[
        int, typer.Option(help="Tokens of each text in which recall is judged: 384 or more.")
    ] = 1024,
    texts: Annotated[int, typer.Option(min=1, max=64, help="Texts of the judgement.")] = 4,
    keys: Annotated[int, typer.Option(min=1, max=20, help="Pass keys in each of them.")] = 1,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Texts that score heads; for gates, a step each.",
            show_default="4, or 40 for gates",
        ),
    ] = None,
    recipe: RecipeName = "default",
    context: Context = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path(
        "heads.json"
    ),
    json: Json = False,
) -> None:
    """Find the attention heads that need all tokens.

    The others need the first tokens and the newest, so their caches can be short. cetane scores
    heads on texts that hide pass keys. It judges several shares of them on other such texts. A
    recipe then names the file.
    """

    with progress("heads") as update:
        from cetane.pipeline.heads import find_heads  # which imports for seconds
        from cetane.pipeline.request import make_request

        result = find_heads(
            make_request(model, recipe, context), output, method.value, tokens, texts, keys, steps,
            progress=update,
        )  # fmt: skip
    if json:
        print_json(
            {
                "scores": result.scores.model_dump(mode="json"),
                "context": result.context,
                "tokens": result.tokens,
                "judged": [asdict(one) for one in result.judged],
            }
        )
        return
    show(result)
    say(f"wrote {output}")
    say("next, in a recipe beside it:")
    say("  [cache.streaming]")
    say(f'  scores = "{output.name}"')


def show(result: HeadsResult) -> None:
    """Print the heads of each layer, and what shares of them cost."""
    kept = result.streaming.kept()
    say(f"the half of the heads that keeps all tokens, by {result.scores.method} (#: keeps)")
    for line in pictures(result, kept):
        say(line)
    whole = result.judged[0]
    table(
        f"pass keys found in texts of {result.tokens} tokens; caches at a context of "
        f"{result.context}",
        ["heads full", "cache", "of all", "found", "of the model's"],
        [
            [
                f"{one.full:.0%}", megabytes(one.cache_bytes),
                f"{one.cache_bytes / whole.cache_bytes:.0%}", f"{one.found} of {one.asked}",
                f"{one.found / whole.found:.2f}" if whole.found else "",
            ]
            for one in result.judged
        ],
    )  # fmt: skip
    if not whole.found:
        say("the model finds no key with all its heads: try fewer --tokens, or fewer --keys")
        return
    *_, least = takewhile(lambda one: one.found >= HOLDS * whole.found, result.judged)
    say(f"recall holds ({HOLDS:.2f} of the model's) down to {least.full:.0%} of the heads")


def pictures(result: HeadsResult, kept: dict[int, tuple[int, ...]]) -> list[str]:
    """Layers side by side, `05 #.#`: eight or fewer in a line of 80 columns."""
    cells = [
        f"{layer:02} " + "".join("#" if head in heads else "." for head in range(len(scores)))
        for layer, scores in enumerate(result.scores.layers)
        if scores and (heads := kept[layer]) is not None
    ]
    width = max(map(len, cells)) + 3
    each = max(1, min(8, 78 // width))
    return [
        "  " + "".join(cell.ljust(width) for cell in cells[start : start + each]).rstrip()
        for start in range(0, len(cells), each)
    ]
