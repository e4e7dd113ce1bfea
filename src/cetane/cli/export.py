"""cetane export: programs in another form."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from cetane.bundle import Bundle, replacing
from cetane.cli.output import Json, console, print_json, progress
from cetane.errors import CetaneError
from cetane.mil import load


def export(
    source: Annotated[Path, typer.Argument(help="A bundle or a .mlpackage.")],
    output: Annotated[Path, typer.Argument(help="The folder to make.")],
    to: Annotated[Literal["onnx"], typer.Option("--to", help="The form.")] = "onnx",
    json: Json = False,
) -> None:
    """Write Core ML programs as ONNX files, one for each function."""
    from cetane.mil.fast.export import export as to_onnx  # onnx takes a while to load

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
