"""cetane port: plan, build and gates in one command."""

import typer

from cetane.checkpoint import open_checkpoint
from cetane.cli.build import Force, Output, make
from cetane.cli.output import Json, Model, RecipeName, console, print_json
from cetane.cli.plan import show
from cetane.cli.validate import check


def port(
    model: Model,
    output: Output = None,
    recipe: RecipeName = "default",
    force: Force = False,
    json: Json = False,
) -> None:
    """Port a model: plan it, build it, and prove that the result is right."""
    bundle = make(model, output, recipe, force)
    if not json:
        show(bundle.plan)
    result = check(bundle, open_checkpoint(model), json)
    if json:
        gates = {"golden": result.model_dump(mode="json")}
        print_json({"bundle": str(bundle.path), "digest": bundle.digest, "gates": gates})
    elif result.passed:
        console.print(f"next: cetane run {bundle.path} --chat", markup=False, soft_wrap=True)
    raise typer.Exit(0 if result.passed else 1)
