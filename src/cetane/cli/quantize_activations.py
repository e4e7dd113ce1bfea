"""cetane quantize-activations: W8A8 and W4A8, and their loss of quality."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cetane.cli.gate_tables import show_checks, show_model, summary
from cetane.cli.options import BundlePath, Checkpoint, Force, Json
from cetane.cli.output import (
    console,
    facts,
    megabytes,
    print_json,
    progress,
    say,
    say_next_run,
    table,
)

if TYPE_CHECKING:
    from cetane.activations import ActivationOutcome


SamplesOption = Annotated[
    Literal["real", "random"],
    typer.Option(help="real: prompts and answers; random: five calls of random numbers."),
]
RangesOption = Annotated[
    Literal["all", "last"],
    typer.Option(help="all: ranges of all samples; last: of the last one, as in coremltools."),
]
TensorsOption = Annotated[
    Literal["inputs", "all"],
    typer.Option(help="inputs: what projections read, less gated products; all: as coremltools."),
]
AdditionsOption = Annotated[
    bool, typer.Option("--additions", help="Quantize additions too, as in coremltools.")
]
SmoothOption = Annotated[bool, typer.Option("--smooth", help="Apply SmoothQuant first.")]
TextOption = Annotated[
    Path | None, typer.Option(help="Judge on this text.", show_default="held-out prompts")
]


def quantize_activations(
    bundle: BundlePath,
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder of the new bundle.")],
    samples: SamplesOption = "real",
    ranges: RangesOption = "all",
    tensors: TensorsOption = "inputs",
    additions: AdditionsOption = False,
    smooth: SmoothOption = False,
    model: Checkpoint = None,
    text: TextOption = None,
    tokens: Annotated[int, typer.Option(min=2, help="The most tokens of the text.")] = 1024,
    force: Force = False,
    json: Json = False,
) -> None:
    """Give a bundle activations of 8 bits.

    It calibrates them, and compares the new bundle with the model. Weights stay unchanged. Exit
    code 1 when the mean cosine of a hidden state or of the logits is below 0.95. It is also 1 when
    the recipe's promise of quality is broken.
    """
    from cetane.activations import Options, judge_activations

    options = Options(
        samples=samples, ranges=ranges, tensors=tensors, additions=additions, smooth=smooth
    )
    with progress("quantize") as update:
        outcome = judge_activations(
            bundle, output, options, model=model, text=text, tokens=tokens, force=force,
            progress=update,
        )  # fmt: skip
    if json:
        print_json({"bundle": str(output)} | outcome.model_dump(mode="json"))
    else:
        show(outcome)
        advise(outcome, output)
    raise typer.Exit(0 if outcome.passed else 1)


def show(outcome: ActivationOutcome) -> None:
    """Print cosines by shard, the quality before and after, and the verdict."""
    before, after = outcome.before, outcome.after
    show_model(outcome.source, outcome.fingerprint)
    table(
        "hidden states after each shard against the model: mean cosine, and the worst token's",
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
    show_checks("activations gate", outcome.checks)
    console.print(f"activations gate: {summary(outcome)}", soft_wrap=True)


def advise(outcome: ActivationOutcome, output: Path) -> None:
    """Print what comes next: a run, or what may pass."""
    from cetane.bundle import Bundle

    if outcome.passed:
        say_next_run(output)
    elif outcome.made.options.tensors == "all":
        say("next: --tensors inputs leaves gated products and outputs in fp16")
    elif not Bundle(output).plan.recipe.compression.rotate:
        say("next: port the model with --set compression.rotate=true, which spreads outliers")
