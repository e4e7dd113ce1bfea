"""cetane vocabulary: chooses the tokens of a smaller head."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cetane.cli.options import Json, Model, RecipeName
from cetane.cli.output import megabytes, print_json, progress, say, table, warn

if TYPE_CHECKING:
    from cetane.pipeline.vocabulary import VocabularyResult


HeldOutOption = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE", help="A text to judge on.", show_default="a tenth of the other texts"
    ),
]
CoverageOption = Annotated[
    float,
    typer.Option(min=0.5, max=1.0, help="The share of text and of choices to cover."),
]
ChoicesOption = Annotated[
    int, typer.Option(min=0, help="The number of the model's own choices to collect.")
]


def vocabulary(
    model: Model,
    text: Annotated[
        list[Path],
        typer.Option(metavar="FILE", help="A text like the future output; repeat for more."),
    ],
    held_out: HeldOutOption = None,
    coverage: CoverageOption = 0.999,
    choices: ChoicesOption = 4096,
    recipe: RecipeName = "default",
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path(
        "subset.json"
    ),
    json: Json = False,
) -> None:
    """Choose the tokens of a smaller head.

    Tokenizer and embeddings stay whole. The head's tokens come from texts, and from the model's own
    greedy choices in these texts. Special tokens, bytes and single characters always stay, so that
    any text can be written. A recipe then names the file.
    """

    with progress("vocabulary") as update:
        from cetane.pipeline.request import make_request  # which imports for seconds
        from cetane.pipeline.vocabulary import choose_vocabulary

        result = choose_vocabulary(
            make_request(model, recipe), text, output, held_out=held_out or [],
            coverage=coverage, choices=choices, progress=update,
        )  # fmt: skip
    if json:
        sizes = [asdict(size) for size in result.sizes]
        print_json({"subset": str(output), "necessary": result.necessary, "sizes": sizes})
        return
    show(result, recipe)
    if result.reached is not None and result.reached < coverage:
        warn(
            f"warning: the tokens cover {result.reached:.2%} of the held-out text, but "
            f"{coverage:.2%} of the texts that chose them; give more texts, or other ones"
        )
    say(f"wrote {output}")
    say("next, in a recipe beside it:")
    say("  [head]")
    say(f'  subset = "{output.name}"')


def show(result: VocabularyResult, recipe: str) -> None:
    """Print the coverage of heads of several sizes."""
    whole = result.sizes[-1].head_bytes
    table(
        f"coverage by size; {result.necessary} tokens always stay; bytes by the recipe {recipe}",
        ["tokens", "", "head", "saved", "texts", "choices", "held out", "its choices"],
        [
            [
                size.tokens, "chosen" if size.chosen else "",
                megabytes(size.head_bytes), megabytes(whole - size.head_bytes),
                *map(percent, (size.texts, size.choices, size.held_out, size.held_out_choices)),
            ]
            for size in result.sizes
        ],
    )  # fmt: skip


def percent(value: float | None) -> str:
    return "" if value is None else f"{value:.2%}"
