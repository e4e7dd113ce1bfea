"""cetane kit: an archive that measures bundles on a Mac."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cetane.cli.options import BundlePath, Json
from cetane.cli.output import Unbroken, facts, megabytes, print_json, progress, say

if TYPE_CHECKING:
    from cetane.pipeline.kit import Kit


def kit(
    bundle: BundlePath,
    other: Annotated[
        Path | None, typer.Argument(metavar="OTHER", help="A bundle to compare it with.")
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="PATH", help="The archive.")
    ] = Path("kit.zip"),
    json: Json = False,
) -> None:
    """Write an archive that measures bundles on a Mac.

    The Mac needs no cetane: only Python, numpy and coremltools. Unpack it there, run `uv run
    measure.py`, and bring its measurements.json back to `cetane import`.
    """
    bundles = [bundle, *([other] if other else [])]
    with progress("kit") as update:
        from cetane.pipeline.kit import make_kit  # which imports for seconds

        made = make_kit(bundles, output, progress=update)
    if json:
        print_json(made.as_json())
    else:
        show(made, bundles)


def show(made: Kit, measured: list[Path]) -> None:
    """Print what the archive holds, and what to do with it."""
    bundles = ", ".join(f"{label} {name}" for label, name in made.bundles.items())
    facts(
        {
            "kit": Unbroken(made.path),
            "size": megabytes(made.bytes),
            "bundles": bundles,
            "functions": made.functions,
        }
    )
    say(f"on a Mac: unzip {shlex.quote(made.path.name)}; cd kit; uv run measure.py")
    following = ["cetane", "import", "measurements.json", *map(str, measured)]
    say(f"then here: {shlex.join(following)}")
