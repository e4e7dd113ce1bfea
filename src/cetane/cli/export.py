"""cetane export: a bundle in the form of another runtime."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from cetane.bundle import Bundle
from cetane.checkpoint import open_checkpoint
from cetane.cli.output import Json, console, print_json, progress
from cetane.cli.validate import BundlePath
from cetane.errors import CetaneError
from cetane.export import coreml_llm


def export(
    bundle: BundlePath,
    output: Annotated[Path, typer.Argument(help="The folder to write.")],
    layout: Annotated[
        Literal["coreml-llm"], typer.Option("--layout", help="Whose form.")
    ] = "coreml-llm",
    json: Json = False,
) -> None:
    """Write a bundle as the folder that another runtime loads, and check that folder."""
    opened = Bundle(bundle)
    opened.verify()
    checkpoint = open_checkpoint(opened.manifest.source)
    if checkpoint.fingerprint != opened.manifest.fingerprint:
        raise CetaneError(
            f"{checkpoint.source} is not the checkpoint that {bundle} was built from",
            "port the model again",
        )
    with progress("export") as update:
        coreml_llm.export(opened, checkpoint, output, update)
    problems = coreml_llm.check(output)
    if json:
        print_json({"folder": str(output), "compile": coreml_llm.COMPILE, "problems": problems})
    for problem in problems if not json else []:
        console.print(problem, markup=False)
    if not problems and not json:
        console.print(f"on a Mac, in {output}: {coreml_llm.COMPILE}", markup=False, soft_wrap=True)
    raise typer.Exit(1 if problems else 0)
