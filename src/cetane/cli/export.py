"""cetane export: writes programs or a bundle for another runtime."""

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

from cetane.cli.options import Checkpoint, Json, MovedLora, refuse
from cetane.cli.output import (
    conclude,
    console,
    print_json,
    progress,
    say,
    show_warnings,
    verdict,
    warn,
)

if TYPE_CHECKING:
    from cetane.pipeline.export import OnnxFolder
    from cetane.pipeline.runtime_folder import RuntimeFolder
    from cetane.schema.manifest import Runtime


def export(
    source: Annotated[
        Path, typer.Argument(metavar="BUNDLE", help="A bundle; for ONNX also an .mlpackage.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write.")],
    layout: Annotated[
        Literal["contract", "anemll", "coreml-llm", "coreai", "onnx"],
        typer.Option(
            "--layout",
            "--target",
            "--to",
            metavar="LAYOUT",
            help="contract: packages, their description and a NumPy host; anemll, coreml-llm: the "
            "folder of that app; coreai: Apple's runner; onnx: every function.",
        ),
    ],
    package: Annotated[
        str | None,
        typer.Option(
            "--package", help="Make only this package anew, in a folder that an app loads."
        ),
    ] = None,
    model: Checkpoint = None,
    lora: MovedLora = None,
    json: Json = False,
) -> None:
    """Write a bundle for your app, or for another runtime.

    cetane checks a folder for another runtime. It plays a folder for ANEMLL or CoreML-LLM by their
    rules, runs one for Core AI in Apple's own runtime, and ONNX files in onnxruntime. Exit code 1
    when the folder breaks the runtime's contract, or computes something else than the bundle.
    """
    if layout == "anemll" or layout == "coreml-llm":
        for_runtime(source, output, layout, package, model, lora, json)
    refuse("is for anemll and coreml-llm, which have single packages", {"--package": package})
    if layout == "coreai":
        as_coreai(source, output, model, lora, json)
    refuse(
        f"is for other layouts: {layout} reads the bundle alone", {"--model": model, "--lora": lora}
    )
    (as_contract if layout == "contract" else as_onnx)(source, output, json)


def as_onnx(source: Path, output: Path, json: bool) -> NoReturn:
    """Write every function as an ONNX file, and print how onnxruntime judged them."""
    with progress("export") as update:
        from cetane.pipeline.export import export_onnx  # which imports for seconds

        folder = export_onnx(source, output, progress=update)
    conclude(folder, json, show_onnx)


def show_onnx(folder: "OnnxFolder") -> None:
    """Print how many functions were written, and the verdict on each package."""
    from cetane.cli.gate_tables import show_checks

    say(f"wrote {folder.path}: {sum(map(len, folder.files.values()))} functions")
    show_checks("onnxruntime on random inputs, against the packages", folder.checks)
    for part in folder.unjudged:
        say(f"not judged: {part}")


def as_contract(source: Path, output: Path, json: bool) -> None:
    """Write the packages with their contract and a host."""
    with progress("export") as update:
        from cetane.pipeline.export import export_contract  # which imports for seconds

        folder = export_contract(source, output, progress=update)
    if json:
        print_json({"folder": str(folder)})
    else:
        host = quote(str(folder / "host.py"))
        say(f"wrote {folder}: read CONTRACT.md; on a Mac, python {host} 1 2 3")
        say(f"here: python -m cetane.bridge {host} 1 2 3")


def for_runtime(
    source: Path,
    output: Path,
    runtime: "Runtime",
    package: str | None,
    model: str | None,
    lora: Path | None,
    json: bool,
) -> NoReturn:
    """Write an app's folder or one package of it, and print how to compile it or its problems."""
    with progress("export") as update:
        from cetane.pipeline.export import export_runtime  # which imports for seconds
        from cetane.pipeline.replacement import replace_package

        if package is None:
            folder = export_runtime(
                source, output, runtime, model=model, lora=lora, progress=update
            )
        else:
            folder = replace_package(
                source, output, runtime, package, model=model, lora=lora, progress=update
            )
    conclude(folder, json, show)


def show(folder: "RuntimeFolder") -> None:
    """Print a folder's verdict, then its problems, or how to compile its packages."""
    from cetane.cli.gate_tables import show_checks

    unread = f", {len(folder.compiled)} compiled ones not" if folder.compiled else ""
    kept = verdict(not folder.problems)
    console.print(f"{folder.app}'s contract: {kept}, {len(folder.packages)} packages read{unread}")
    for problem in folder.problems:
        warn(problem)
    if folder.checks:
        show_checks(
            f"played by {folder.app}'s rules on this CPU, against the bundle", folder.checks
        )
    for part in folder.unjudged:
        say(f"not judged: {part}")
    if folder.passed and folder.packages:
        say(f"on a Mac, in {folder.path}: {folder.compile}")


def as_coreai(
    source: Path, output: Path, model: str | None, lora: Path | None, json: bool
) -> NoReturn:
    """Write a folder for Apple's Core AI runner, and print how its runtime judged it here."""
    from cetane.cli.gate_tables import show_checks

    with progress("export") as update:
        from cetane.pipeline.export import export_coreai  # which imports for seconds

        folder = export_coreai(source, output, model=model, lora=lora, progress=update)
    if json:
        print_json(
            {"folder": str(folder.path), "compile": folder.compile, "passed": folder.result.passed,
             "warnings": folder.warnings, **folder.result.model_dump(mode="json")}
        )  # fmt: skip
    else:
        show_warnings(folder.warnings)
        show_checks("Apple's runtime on this CPU, against the bundle", folder.result.checks)
        say(f"not run on a device; on a Mac with Xcode 27, in {folder.path}: {folder.compile}")
    raise typer.Exit(0 if folder.result.passed else 1)
