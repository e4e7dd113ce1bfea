"""cetane quantize-activations: W8A8 and W4A8, and what they cost."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from cetane.activations import Options, Outcome, held_out, measure_activations, windows
from cetane.bundle import Bundle
from cetane.checkpoint import open_checkpoint
from cetane.cli.output import BundlePath, Json, console, megabytes, print_json, progress, table
from cetane.gates.quality import read_tokens

DEFAULTS = Options()


def quantize_activations(
    bundle: BundlePath,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the new bundle goes.")],
    samples: Annotated[
        Literal["real", "random"],
        typer.Option(help="real: prompts and answers; random: five calls of random numbers."),
    ] = DEFAULTS.samples,
    ranges: Annotated[
        Literal["all", "last"],
        typer.Option(help="Of all samples, or of the last one, as coremltools itself keeps."),
    ] = DEFAULTS.ranges,
    additions: Annotated[
        bool, typer.Option("--additions", help="Quantize additions too, as coremltools does.")
    ] = DEFAULTS.additions,
    smooth: Annotated[
        bool, typer.Option("--smooth", help="SmoothQuant first (models of the Llama family).")
    ] = DEFAULTS.smooth,
    model: Annotated[
        str | None, typer.Option(help="The checkpoint, if it is not where the build found it.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="Judge on this text.", show_default="held-out prompts")
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="How many tokens of the text.")] = 1024,
    force: Annotated[bool, typer.Option("--force", help="Replace a bundle at that place.")] = False,
    json: Json = False,
) -> None:
    """Give a bundle activations of 8 bits, calibrated, and compare it with the model.

    Weights stay as they are. Exit code 1 when a hidden state's mean cosine is below 0.95.
    """
    options = Options(samples=samples, ranges=ranges, additions=additions, smooth=smooth)
    opened = Bundle(bundle)
    opened.verify()
    checkpoint = open_checkpoint(model or opened.manifest.source)
    if text is None:
        texts = held_out(opened, tokens)
    else:
        ids = read_tokens(opened.tokenizer, text, tokens)
        texts = windows(ids, opened.plan.recipe.cache.context)
    with progress("quantize") as update:
        outcome = measure_activations(opened, checkpoint, options, texts, output, update, force)
    if json:
        print_json({"bundle": str(output)} | outcome.model_dump(mode="json"))
    else:
        show(outcome)
    raise typer.Exit(0 if outcome.passed else 1)


def show(outcome: Outcome) -> None:
    """Print cosines by shard, the quality before and after, and the verdict."""
    before, after = outcome.before, outcome.after
    table(
        "what shards hand on, against the model (mean cosine, worst token)",
        ["shard", "before", "worst", "after", "worst"],
        [
            [two.shard, one.cosine, one.cosine_min, two.cosine, two.cosine_min]
            for one, two in zip(before.shards, after.shards, strict=True)
        ],
    )
    rows: list[list[Any]] = [
        ["perplexity", before.perplexity, after.perplexity],
        ["KL to the model", before.logits.kl, after.logits.kl],
        ["top-1 agreement", before.logits.top1, after.logits.top1],
        ["logit cosine", before.logits.cosine, after.logits.cosine],
        ["size of shards", megabytes(outcome.bytes_before), megabytes(outcome.bytes_after)],
    ]
    title = f"{outcome.tokens} tokens; the model's perplexity is {outcome.reference_perplexity:.2f}"
    table(title, ["what", "before", "after"], rows)
    made = outcome.made
    console.print(
        f"{made.samples} calls calibrated {made.quantized} tensors in {outcome.seconds:.0f} s"
    )
    verdict = "[bold green]pass[/]" if outcome.passed else "[bold red]FAIL[/]"
    smallest = f"smallest cosine {after.cosine:.4f}, limit {outcome.limit}"
    console.print(f"activations gate: {verdict} ({smallest})", highlight=False)
