"""Lines of a validation: every gate, shards alone, or perplexities."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cetane.cli.gate_tables import show_golden, show_head, show_model, show_why
from cetane.cli.output import console, facts, say, say_next_run, show_warnings, verdict, warn

if TYPE_CHECKING:
    from cetane.gates.layers import LayersResult
    from cetane.gates.quality import TextQuality
    from cetane.pipeline.validate import Validation


def show_layers(result: LayersResult) -> None:
    """Print every shard, then the line that the published validator ends with."""
    show_model(result.source, result.fingerprint)
    show_warnings(result.warnings)
    for one in result.screened:
        warn(f"token {one.token} is left out: {one.reason}")
    for score in result.shards:
        console.print(
            f"{score.shard}: {verdict(score.passed)}, mean {score.mean:.6f}, min {score.min:.6f}"
        )
    say(result.line)


def show_perplexity(quality: TextQuality) -> None:
    """Print the perplexities of a bundle and of its model, and the verdict."""
    show_warnings(quality.warnings)
    values = quality.model_dump(exclude={"passed", "warnings"})
    facts({name.replace("_", " "): value for name, value in values.items()}, "perplexity")
    console.print(f"perplexity: {verdict(quality.passed)}")


def show_gates(result: Validation, verbose: bool, bundle: Path) -> None:
    """Print every gate, and what follows."""
    for finding in result.static:
        warn(str(finding))
    if result.golden is None:
        console.print(f"static checks: {verdict(False)}")
        return
    show_model(result.golden.source, result.golden.fingerprint)
    show_golden(result.golden, verbose)
    show_why(result.explanation)
    for kind, head in result.heads.items():
        show_head(kind, head)
    if result.passed:
        say_next_run(bundle)
