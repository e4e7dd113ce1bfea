"""cetane train-head: trains a draft head for a bundle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cetane.cli.options import BundlePath, Checkpoint, Json
from cetane.cli.output import conclude, progress, say, say_next, say_wrapped, table, warn

if TYPE_CHECKING:
    from cetane.pipeline.draft_head_result import TrainedDraftHead


def train_head(
    bundle: BundlePath,
    kind: Annotated[
        Literal["medusa", "eagle3"],
        typer.Argument(metavar="KIND", help="eagle3 guesses better, medusa costs less."),
    ],
    text: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="A text to learn from; repeat for more.",
            show_default="answers that the model writes",
        ),
    ] = None,
    model: Checkpoint = None,
    features: Annotated[
        Path | None,
        typer.Option(help="A folder that keeps hidden states for other runs."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="The most tokens of each text.")] = 200_000,
    window: Annotated[int, typer.Option(min=16, help="Tokens of a training window.")] = 256,
    vocabulary: Annotated[int, typer.Option(min=1, help="Number of tokens to propose.")] = 8192,
    steps: Annotated[int, typer.Option(min=1, max=16, help="Tokens of a draft.")] = 3,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the whole text.")] = 10,
    minutes: Annotated[
        float, typer.Option(min=0, help="The most minutes, for text and hidden states too.")
    ] = 30.0,
    batch: Annotated[int, typer.Option(min=1, help="Windows of a step, on each device.")] = 4,
    json: Json = False,
) -> None:
    """Train a draft head, and add it to its bundle.

    It learns from hidden states of decoding calls, and replaces an earlier draft head of its kind.
    With `torchrun`, it trains on several devices. Exit code 1 when its golden gate fails: then an
    earlier one stays.
    """
    with progress(f"train {kind}") as update:  # which imports for seconds
        from cetane.pipeline.draft_head import train_draft_head as train
        from cetane.pipeline.draft_head_result import DraftHeadSettings

        settings = DraftHeadSettings(tokens, window, vocabulary, steps, epochs, minutes, batch)
        result = train(
            bundle,
            kind,
            text or [],
            settings=settings,
            model=model,
            features=features,
            progress=update,
        )  # fmt: skip
    if result is None:  # one of several processes, and not the main one
        raise typer.Exit
    conclude(result, json, lambda trained: show_all([trained], bundle))


def show_all(results: Sequence[TrainedDraftHead], bundle: Path) -> None:
    """Print what became of draft heads, and what follows."""
    for result in results:
        show(result)
    if all(result.passed for result in results):
        say_next("bench", bundle)


def show(result: TrainedDraftHead) -> None:
    """Print the shares of right drafted tokens, the gate and the files."""
    from cetane.cli.gate_tables import show_head

    after, other = result.trained, result.untrained or result.elsewhere
    name = "right, untrained" if result.untrained else "right, where it was trained"
    before: Sequence[float | None] = other.top1 if other else ()
    if len(before) != len(after.top1):  # one of the two was not judged
        before = [None] * len(after.top1)
    shares = zip(before, after.top1, after.accepted, strict=True)
    rows = [[place, *row] for place, row in enumerate(shares, 1)]
    columns = ["drafted token", name, "right", "right, with all before it"]
    if rows:
        table(f"{result.head.name} on {after.positions} held-out positions", columns, rows)
    else:
        steps = result.head.manifest.steps
        say(
            f"{result.head.name}: not judged, since the held-out text has no {steps} tokens in a "
            "row that the model would choose"
        )
    show_head(result.head.name, result.golden)
    if not result.placed:
        warn(f"the earlier {result.head.name} head stays in the bundle, since the new one failed")
        return
    judged = f"residency on {result.residency.target}, predicted"
    if result.residency.tiny:
        say_wrapped(f"{judged}: so small a draft head stays on the CPU, by the rule tiny-program")
    for reason in result.residency.reasons:
        warn(f"warning: {judged}: {reason}")
    if result.worse:
        warn(
            "warning: it knows far fewer tokens than where it was trained: is it of another model?"
        )
    say(f"wrote {result.head.path}")
