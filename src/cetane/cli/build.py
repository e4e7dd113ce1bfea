"""cetane build: checkpoint to bundle."""

from pathlib import Path
from typing import Annotated

import typer

from cetane.bundle import Bundle
from cetane.checkpoint import open_checkpoint
from cetane.cli.output import Json, Model, RecipeName, console, megabytes, print_json, progress
from cetane.cli.output import table as print_table
from cetane.errors import CetaneError
from cetane.pipeline.build import Gate, build_only
from cetane.pipeline.build import build as build_bundle
from cetane.schema.recipe import load_recipe

Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="Where the bundle goes.", show_default="NAME")
]
Force = Annotated[bool, typer.Option("--force", help="Replace another bundle at that place.")]
SkipExisting = Annotated[
    bool,
    typer.Option(
        "--skip-existing/--rebuild", help="Keep what an interrupted build left, or make it anew."
    ),
]


def build(
    model: Model,
    output: Output = None,
    recipe: RecipeName = "default",
    only: Annotated[
        list[str] | None,
        typer.Option(help="Make only the shards of this name or pattern, and no bundle yet."),
    ] = None,
    skip_existing: SkipExisting = True,
    force: Force = False,
    json: Json = False,
) -> None:
    """Build a bundle, without gates. Run again after an interruption: it resumes."""
    if only:
        target = place(model, output, recipe)
        with progress("build") as update:
            made = build_only(
                open_checkpoint(model), load_recipe(recipe), target, only, update, not skip_existing
            )
        sizes = {
            name: sum(file.stat().st_size for file in package.rglob("*") if file.is_file())
            for name, package in made.items()
        }
        if json:
            print_json({"shards": {n: {"path": str(made[n]), "bytes": sizes[n]} for n in made}})
        else:
            rows = [[name, str(path), megabytes(sizes[name])] for name, path in made.items()]
            print_table("shards", ["name", "package", "size"], rows)
        return
    bundle = make(model, output, recipe, force, skip_existing)
    if json:
        print_json({"bundle": str(bundle.path), "digest": bundle.digest})
    else:
        console.print(f"built {bundle.path}", markup=False, soft_wrap=True)


def place(model: str, output: Path | None, recipe: str) -> Path:
    """Where the bundle goes."""
    if output is not None and output.name in ("", ".."):  # it is renamed to, so it needs a name
        raise CetaneError(f"--output {output}: does not end with a name for the bundle")
    name = Path(model).resolve().name.removesuffix(".gguf").removesuffix(".safetensors")
    return output or Path(f"{name}-{load_recipe(recipe).name}")


def make(
    model: str,
    output: Path | None,
    recipe: str,
    force: bool,
    skip_existing: bool,
    gate: Gate | None = None,
) -> Bundle:
    """Build with a progress bar."""
    target = place(model, output, recipe)
    chosen, checkpoint = load_recipe(recipe), open_checkpoint(model)
    with progress("build") as update:
        return build_bundle(checkpoint, chosen, target, update, force, gate, not skip_existing)
