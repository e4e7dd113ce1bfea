"""cetane export: programs, or a bundle, in the form of another runtime."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from cetane.bundle import Bundle
from cetane.checkpoint import open_checkpoint
from cetane.cli.output import Json, console, print_json, progress
from cetane.errors import CetaneError
from cetane.export import coreml_llm
from cetane.files import replacing
from cetane.mil import load


def export(
    source: Annotated[Path, typer.Argument(help="A bundle, or with --to a .mlpackage.")],
    output: Annotated[Path, typer.Argument(help="The folder to write.")],
    to: Annotated[
        Literal["onnx"] | None, typer.Option("--to", help="Every function in this form.")
    ] = None,
    layout: Annotated[
        Literal["coreml-llm"] | None,
        typer.Option("--layout", help="The folder that this runtime loads, checked."),
    ] = None,
    json: Json = False,
) -> None:
    """Write Core ML programs as ONNX files, or a bundle for another runtime."""
    if (to is None) == (layout is None):
        raise CetaneError("give one of: --to onnx, --layout coreml-llm")
    if to is not None:
        _onnx(source, output, json)
    else:
        _coreml_llm(source, output, json)


def _onnx(source: Path, output: Path, json: bool) -> None:
    from cetane.mil.fast.onnx_files import export as to_onnx  # onnx takes a while to load

    if output.exists():
        raise CetaneError(f"{output} exists", "choose another folder, or remove it")
    if source.suffix == ".mlpackage":
        packages = {source.stem: source}
    else:
        bundle = Bundle(source)
        bundle.verify()
        packages = {shard.name: bundle.shard(shard.name) for shard in bundle.plan.shards}
    written: dict[str, list[str]] = {}
    with replacing(output) as folder:
        folder.mkdir()
        for name, package in packages.items():
            with progress(f"export {name}") as update:
                (folder / name).mkdir()
                files = to_onnx(load(package), folder / name, update)
            written[name] = [f"{name}/{file.name}" for file in files.values()]
    if json:
        print_json({"folder": str(output), "files": written})
    else:
        count = sum(map(len, written.values()))
        console.print(f"wrote {output}: {count} functions", markup=False, soft_wrap=True)


def _coreml_llm(source: Path, output: Path, json: bool) -> None:
    bundle = Bundle(source)
    bundle.verify()
    checkpoint = open_checkpoint(bundle.manifest.source)
    if checkpoint.fingerprint != bundle.manifest.fingerprint:
        raise CetaneError(
            f"{checkpoint.source} is not the checkpoint that {source} was built from",
            "port the model again",
        )
    with progress("export") as update:
        coreml_llm.export(bundle, checkpoint, output, update)
    problems = coreml_llm.check(output)
    if json:
        print_json({"folder": str(output), "compile": coreml_llm.COMPILE, "problems": problems})
    for problem in problems if not json else []:
        console.print(problem, markup=False)
    if not problems and not json:
        console.print(f"on a Mac, in {output}: {coreml_llm.COMPILE}", markup=False, soft_wrap=True)
    raise typer.Exit(1 if problems else 0)
