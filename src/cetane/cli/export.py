"""cetane export: writes programs or a bundle for another runtime."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from cetane.cli.options import Json
from cetane.cli.output import print_json, progress, say, warn


def export(
    source: Annotated[
        Path, typer.Argument(metavar="BUNDLE", help="A bundle; for ONNX also an .mlpackage.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write.")],
    to: Annotated[
        Literal["onnx", "coreml-llm", "coreai"],
        typer.Option(
            "--to",
            "--target",
            help="onnx: every function; coreml-llm: that runtime's folder; coreai: Apple's runner.",
        ),
    ],
    json: Json = False,
) -> None:
    """Write Core ML programs as ONNX files, or a bundle for another runtime.

    Exit code 1 when the folder breaks the other runtime's contract, or when Apple's runtime does
    not compute what the bundle does.
    """
    if to == "onnx":
        as_onnx(source, output, json)
    elif to == "coreai":
        as_coreai(source, output, json)
    else:
        as_coreml_llm(source, output, json)


def as_onnx(source: Path, output: Path, json: bool) -> None:
    """Write every function as an ONNX file."""
    from cetane.pipeline.export import export_onnx

    with progress("export") as update:
        written = export_onnx(source, output, progress=update)
    if json:
        print_json({"folder": str(output), "files": written})
    else:
        say(f"wrote {output}: {sum(map(len, written.values()))} functions")


def as_coreml_llm(source: Path, output: Path, json: bool) -> None:
    """Write a folder for CoreML-LLM's runtime, and print how to compile its packages."""
    from cetane.pipeline.export import export_coreml_llm

    with progress("export") as update:
        folder = export_coreml_llm(source, output, progress=update)
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


def as_coreai(source: Path, output: Path, json: bool) -> None:
    """Write a folder for Apple's Core AI runner, and print how its runtime judged it here."""
    from cetane.cli.gate_tables import show_checks
    from cetane.pipeline.export import export_coreai

    with progress("export") as update:
        folder = export_coreai(source, output, progress=update)
    if json:
        print_json(
            {"folder": str(folder.path), "compile": folder.compile, "passed": folder.result.passed,
             "warnings": folder.warnings, **folder.result.model_dump(mode="json")}
        )  # fmt: skip
    else:
        for warning in folder.warnings:
            warn(f"warning: {warning}")
        show_checks("Apple's runtime on this CPU, against the bundle", folder.result.checks)
        say(f"not run on a device; on a Mac with Xcode 27, in {folder.path}: {folder.compile}")
    raise typer.Exit(0 if folder.result.passed else 1)
