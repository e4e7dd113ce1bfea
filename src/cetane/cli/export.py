"""cetane export: writes programs or a bundle for another runtime."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cetane.cli.options import Json
from cetane.cli.output import print_json, progress, say, warn

if TYPE_CHECKING:
    from cetane.pipeline.export import RuntimeFolder


def export(
    source: Annotated[
        Path, typer.Argument(metavar="BUNDLE", help="A bundle; for ONNX also an .mlpackage.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write.")],
    layout: Annotated[
        Literal["contract", "coreml-llm", "onnx"],
        typer.Option(
            "--layout",
            "--to",
            help="contract: packages, their description and a NumPy host; coreml-llm: that "
            "runtime's folder; onnx: every function.",
        ),
    ],
    json: Json = False,
) -> None:
    """Write a bundle for an app: in the form of its runtime, or with a description for your own.

    Exit code 1 when the folder breaks the other runtime's contract.
    """
    WRITERS[layout](source, output, json)


def as_onnx(source: Path, output: Path, json: bool) -> None:
    """Write every function as an ONNX file."""
    from cetane.pipeline.export import export_onnx

    with progress("export") as update:
        written = export_onnx(source, output, progress=update)
    if json:
        print_json({"folder": str(output), "files": written})
    else:
        say(f"wrote {output}: {sum(map(len, written.values()))} functions")


def as_contract(source: Path, output: Path, json: bool) -> None:
    """Write the packages with their contract and a host."""
    from cetane.pipeline.export import export_contract

    with progress("export") as update:
        folder = export_contract(source, output, progress=update)
    if json:
        print_json({"folder": str(folder)})
    else:
        say(f"wrote {folder}: read CONTRACT.md; on a Mac, python {folder}/host.py 1 2 3")
        say(f"here: python -m cetane.bridge {folder}/host.py 1 2 3")


def as_coreml_llm(source: Path, output: Path, json: bool) -> None:
    """Write a folder for CoreML-LLM's runtime, and print how to compile its packages."""
    from cetane.pipeline.export import export_coreml_llm

    with progress("export") as update:
        folder = export_coreml_llm(source, output, progress=update)
    show(folder, json)


def show(folder: "RuntimeFolder", json: bool) -> None:
    """Print a folder's problems, or how to compile its packages. Exit code 1 if it has any."""
    if json:
        print_json(
            {"folder": str(folder.path), "compile": folder.compile, "problems": folder.problems}
        )
    else:
        for problem in folder.problems:
            warn(problem)
        if not folder.problems:
            say(f"on a Mac, in {folder.path}: {folder.compile}")
    raise typer.Exit(1 if folder.problems else 0)


WRITERS: dict[str, Callable[[Path, Path, bool], None]] = {
    "contract": as_contract,
    "coreml-llm": as_coreml_llm,
    "onnx": as_onnx,
}
"""The function for each layout: it writes the folder, and prints the outcome."""
