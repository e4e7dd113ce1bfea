"""cetane vocabulary: the tokens that a smaller head needs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from cetane.checkpoint import open_checkpoint
from cetane.cli.output import (
    Json,
    Model,
    RecipeName,
    console,
    errors,
    megabytes,
    print_json,
    progress,
    table,
)
from cetane.files import disk_errors, write_json
from cetane.gates.reference import Reference
from cetane.pipeline.vocabulary import fewest, make_subset, ranked, read_text, split, with_choices
from cetane.planner import Planner
from cetane.schema.recipe import load_recipe
from cetane.schema.subset import Counted, Subset


def vocabulary(
    model: Model,
    text: Annotated[list[Path], typer.Option(help="A text like those to write; may be repeated.")],
    held_out: Annotated[
        list[Path] | None,
        typer.Option(help="A text to judge by.", show_default="every tenth part of the others"),
    ] = None,
    coverage: Annotated[
        float, typer.Option(min=0.5, max=1.0, help="Of the text, and of the model's choices.")
    ] = 0.999,
    choices: Annotated[
        int, typer.Option(min=0, help="Tokens after which the model is asked for its choice.")
    ] = 4096,
    recipe: RecipeName = "default",
    output: Annotated[Path, typer.Option("--output", "-o")] = Path("subset.json"),
    json: Json = False,
) -> None:
    """Choose the tokens that a head must have. Tokenizer and embeddings stay whole.

    Chosen from texts and from the model's own greedy choices after them; special tokens, bytes and
    single characters always stay, so any text can still be written.
    """
    checkpoint, chosen = open_checkpoint(model), load_recipe(recipe)
    planner, tokenizer = Planner(checkpoint, chosen), checkpoint.tokenizer
    texts = [read_text(tokenizer, path) for path in text]
    if held_out:
        held = [read_text(tokenizer, path) for path in held_out]
    else:
        parts = [split(one) for one in texts]
        texts, held = [part for part, _ in parts], [part for _, part in parts]
    if choices:
        reference = Reference(checkpoint)
        with progress("vocabulary") as update:
            texts = with_choices(texts, reference, choices, update)
            held = with_choices(held, reference, choices, update)
    vocab, necessary = planner.model.vocab, tokenizer.necessary()
    order = ranked(texts, vocab, necessary)
    size = fewest(texts, order, len(necessary), coverage)

    def subset_of(rows: int) -> Subset:
        return make_subset(order, rows, tokenizer, texts, held)

    def head_bytes(found: Subset) -> int:
        (head,) = planner.model.heads(1, found.ids)
        formats = planner.recipe.compression
        return sum(
            formats.format_for(weight.name, weight.kind).nbytes(weight.shape)
            for _, weight in head.weights()
            if weight.kind
        )

    sizes = sorted({len(necessary), size, vocab // 8, vocab // 4, vocab // 2, vocab})
    rows = [
        {
            "tokens": rows,
            "chosen": rows == size,
            "head_bytes": head_bytes(found := subset_of(rows)),
            "texts": share(found.texts, "covered", "tokens"),
            "choices": share(found.texts, "choices_covered", "choices"),
            "held_out": share(found.held_out, "covered", "tokens"),
            "held_out_choices": share(found.held_out, "choices_covered", "choices"),
        }
        for rows in sizes
        if rows >= min(len(necessary), vocab)
    ]
    with disk_errors(output):
        write_json(output, subset_of(size).model_dump(mode="json"))
    if json:
        print_json({"subset": str(output), "necessary": len(necessary), "sizes": rows})
    else:
        show(rows, len(necessary), chosen.name)
        reached = share(subset_of(size).held_out, "covered", "tokens")
        if reached is not None and reached < coverage:
            errors.print(
                f"warning: {reached:.2%} of the held-out text, not {coverage:.2%}, as of the texts "
                "that the tokens were chosen from: more of them, or others, would tell more",
                markup=False, soft_wrap=True,
            )  # fmt: skip
        hint = f'[head] subset = "{output.name}" in a recipe beside it'
        console.print(f"wrote {output}; {hint}", markup=False, soft_wrap=True)


def share(texts: Sequence[Counted], part: str, whole: str) -> float | None:
    """How much of some texts is covered; None where nothing was counted."""
    total = sum(getattr(text, whole) for text in texts)
    return sum(getattr(text, part) for text in texts) / total if total else None


def show(rows: Sequence[dict[str, Any]], necessary: int, recipe: str) -> None:
    """Print what a head of every size covers."""
    whole = rows[-1]["head_bytes"]

    def percent(value: float | None) -> str:
        return "" if value is None else f"{value:.2%}"

    table(
        f"coverage by size; {necessary} tokens always stay; bytes by the recipe {recipe}",
        ["tokens", "", "head", "saved", "texts", "choices", "held out", "its choices"],
        [
            [
                row["tokens"],
                "chosen" if row["chosen"] else "",
                megabytes(row["head_bytes"]),
                megabytes(whole - row["head_bytes"]),
                *(percent(row[k]) for k in ("texts", "choices", "held_out", "held_out_choices")),
            ]
            for row in rows
        ],
    )
