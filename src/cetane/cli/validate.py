"""cetane validate: runs the gates of a finished bundle."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cetane.cli.options import Checkpoint, Json, Verbose
from cetane.cli.output import conclude, console, facts, print_json, progress, verdict, warn

if TYPE_CHECKING:
    from cetane.pipeline.validate import Validation


def validate(
    bundle: Annotated[
        Path,
        typer.Argument(metavar="BUNDLE", help="A bundle, or a folder for CoreML-LLM's runtime."),
    ],
    model: Checkpoint = None,
    text: Annotated[
        Path | None,
        typer.Option("--perplexity", help="Measure perplexity on a text file instead."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="The most tokens of the text.")] = 20_000,
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """Compare a bundle with the Hugging Face model, and its draft heads with the trained ones.

    Before that, its packages and tables are compared with its manifest and with each other. Exit
    code 1 when a gate fails.
    """
    from cetane.pipeline import validate as gates

    if (bundle / "model_config.json").is_file():  # no bundle has this file
        validate_folder(bundle, json)
    if text is not None:
        measure(bundle, text, tokens, model, json)
    with progress("validate") as update:
        result = gates.validate(bundle, model=model, progress=update)
    conclude(result, json, lambda outcome: show(outcome, verbose))


def validate_folder(folder: Path, json: bool) -> None:
    """Check a folder against the contract of CoreML-LLM's runtime."""
    from cetane.export import coreml_llm

    problems = coreml_llm.check(folder)
    if json:
        print_json({"problems": problems})
    for problem in problems if not json else []:
        warn(problem)
    raise typer.Exit(1 if problems else 0)


def measure(bundle: Path, text: Path, tokens: int, model: str | None, json: bool) -> None:
    """Measure perplexity."""
    from cetane.pipeline.validate import perplexity

    with progress("perplexity") as update:
        quality = perplexity(bundle, text, tokens=tokens, model=model, progress=update)
    if json:
        print_json({"perplexity": quality.model_dump(mode="json")})
    else:
        values = quality.model_dump(exclude={"passed"})
        facts({name.replace("_", " "): value for name, value in values.items()}, "perplexity")
        console.print(f"perplexity: {verdict(quality.passed)}")
    raise typer.Exit(0 if quality.passed else 1)


def show(result: "Validation", verbose: bool) -> None:
    """Print every gate."""
    from cetane.cli.gate_tables import show_golden, show_head, show_why

    for warning in result.warnings:
        warn(f"warning: {warning}")
    for finding in result.static:
        warn(str(finding))
    if result.golden is None:
        console.print(f"static checks: {verdict(False)}")
        return
    show_golden(result.golden, verbose)
    show_why(result.explanation)
    for kind, head in result.heads.items():
        show_head(kind, head)
