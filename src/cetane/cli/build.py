"""cetane build: checkpoint to bundle."""

from pathlib import Path
from typing import Annotated

import typer

from cetane.build import build as build_bundle
from cetane.bundle import Bundle
from cetane.checkpoint import open_checkpoint
from cetane.cli.output import Json, Model, RecipeName, console, print_json, progress
from cetane.errors import CetaneError
from cetane.recipe import load_recipe

Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="Where the bundle goes.", show_default="NAME")
]
Force = Annotated[bool, typer.Option("--force", help="Replace another bundle at that place.")]


def build(
    model: Model,
    output: Output = None,
    recipe: RecipeName = "default",
    force: Force = False,
    json: Json = False,
) -> None:
    """Build a bundle, without gates. Run again after an interruption: it resumes."""
    bundle = make(model, output, recipe, force)
    if json:
        print_json({"bundle": str(bundle.path), "digest": bundle.digest})
    else:
        console.print(f"built {bundle.path}", markup=False, soft_wrap=True)


def make(model: str, output: Path | None, recipe: str, force: bool) -> Bundle:
    """Build with a progress bar."""
    if output is not None and output.name in ("", ".."):  # it is renamed to, so it needs a name
        raise CetaneError(f"--output {output}: does not end with a name for the bundle")
    chosen = load_recipe(recipe)
    checkpoint = open_checkpoint(model)
    name = Path(model).resolve().name.removesuffix(".gguf").removesuffix(".safetensors")
    target = output or Path(f"{name}-{chosen.name}")
    with progress("build") as update:
        return build_bundle(checkpoint, chosen, target, update, force)
