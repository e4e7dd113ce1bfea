"""cetane quantize-activations: W8A8 and W4A8, and what they cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cetane.cli.options import BundlePath, Checkpoint, Force, Json
from cetane.cli.output import console, facts, megabytes, print_json, progress, say, table, verdict

if TYPE_CHECKING:
    from cetane.activations import Outcome


SamplesOption = Annotated[
    Literal["real", "random"],
    typer.Option(help="real: prompts and answers; random: five calls of random numbers."),
]
RangesOption = Annotated[
    Literal["all", "last"],
    typer.Option(help="Of all samples, or of the last one, as coremltools itself keeps."),
]
AdditionsOption = Annotated[
    bool, typer.Option("--additions", help="Quantize additions too, as coremltools does.")
]
SmoothOption = Annotated[
    bool, typer.Option("--smooth", help="SmoothQuant first (models of the Llama family).")
]
TextOption = Annotated[
    Path | None, typer.Option(help="Judge on this text.", show_default="held-out prompts")
]


def quantize_activations(
    bundle: BundlePath,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the new bundle goes.")],
    samples: SamplesOption = "real",
    ranges: RangesOption = "all",
    additions: AdditionsOption = False,
    smooth: SmoothOption = False,
    model: Checkpoint = None,
    text: TextOption = None,
    tokens: Annotated[int, typer.Option(min=2, help="Most tokens of the text.")] = 1024,
    force: Force = False,
    json: Json = False,
) -> None:
    """Give a bundle activations of 8 bits, calibrated, and compare it with the model.

    Weights stay as they are. Exit code 1 when a hidden state's mean cosine is below 0.95.
    """
    from cetane.activations import Options, judge_activations

    options = Options(samples=samples, ranges=ranges, additions=additions, smooth=smooth)
    with progress("quantize") as update:
        outcome = judge_activations(
            bundle, output, options, model=model, text=text, tokens=tokens, force=force,
            progress=update,
        )  # fmt: skip
    if json:
        print_json({"bundle": str(output)} | outcome.model_dump(mode="json"))
    else:
        show(outcome)
    raise typer.Exit(0 if outcome.passed else 1)


def show(outcome: Outcome) -> None:
    """Print cosines by shard, the quality before and after, and the verdict."""
    before, after = outcome.before, outcome.after
    table(
        "what shards hand on, against the model: mean cosine, and of the worst token",
        ["shard", "before", "worst", "after", "worst"],
        [
            [two.shard, one.cosine, one.cosine_min, two.cosine, two.cosine_min]
            for one, two in zip(before.shards, after.shards, strict=True)
        ],
    )
    title = f"{outcome.tokens} tokens; the model's perplexity is {outcome.reference_perplexity:.2f}"
    rows = [
        ["perplexity", before.perplexity, after.perplexity],
        ["KL to the model", before.logits.kl, after.logits.kl],
        ["top-1 agreement", before.logits.top1, after.logits.top1],
        ["logit cosine", before.logits.cosine, after.logits.cosine],
    ]
    table(title, ["what", "before", "after"], rows)
    facts({"size": f"{megabytes(outcome.bytes_before)}, now {megabytes(outcome.bytes_after)}"})
    made = outcome.made
    say(f"{made.samples} calls calibrated {made.quantized} tensors in {outcome.seconds:.0f} s")
    smallest = f"smallest cosine {after.cosine:.4f}, limit {outcome.limit}"
    console.print(f"activations gate: {verdict(outcome.passed)} ({smallest})")
