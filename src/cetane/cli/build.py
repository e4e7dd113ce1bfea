"""cetane build: checkpoint to bundle, without gates."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cetane.cli.crew import crew
from cetane.cli.options import (
    Adapters,
    Bits,
    Context,
    Force,
    Json,
    Lora,
    Model,
    Output,
    Rebuild,
    RecipeName,
    Scheduler,
    Settings,
    StoreUrl,
    Workers,
    parse_adapters,
    parse_changes,
    refuse,
)
from cetane.cli.output import megabytes, print_json, progress, say, say_bundle, say_next, table

if TYPE_CHECKING:
    from cetane.pipeline.request import Request


def build(
    model: Model,
    output: Output = None,
    recipe: RecipeName = "default",
    context: Context = None,
    bits: Bits = None,
    settings: Settings = None,
    lora: Lora = None,
    adapter: Adapters = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Make only shards of this name or pattern, and no bundle yet; cetane plan shows "
            "their names. May be repeated.",
        ),
    ] = None,
    rebuild: Rebuild = False,
    force: Force = False,
    workers: Workers = None,
    scheduler: Scheduler = None,
    store: StoreUrl = None,
    json: Json = False,
) -> None:
    """Build a bundle, without gates.

    After an interruption, run it again: it resumes. cetane validate judges the bundle.
    """
    with progress("build"):  # which imports for seconds
        from cetane.pipeline.build import build as build_bundle
        from cetane.pipeline.request import make_request

        request = make_request(
            model, recipe, context, bits, parse_changes(settings), lora=lora,
            adapters=parse_adapters(adapter),
        )  # fmt: skip
        target = request.target(output)
    if only:
        given = {"--workers": workers, "--scheduler": scheduler, "--store": store, "--force": force}
        refuse("is for whole bundles, not for --only", given)
        build_some(request, target, only, rebuild, json)
        return
    kept = target.exists() and not (rebuild or force)  # another bundle there is an error
    with crew(workers, scheduler, store, rebuild) as opened, progress("build") as update:
        bundle = build_bundle(
            request.checkpoint, request.recipe, target, update, force, rebuild=rebuild,
            workers=opened,
        )  # fmt: skip
    if json:
        print_json({"bundle": str(bundle.path), "digest": bundle.digest})
    else:
        say_bundle(bundle, kept)
        say_next("validate", bundle.path)


def build_some(
    request: "Request", target: Path, only: list[str], rebuild: bool, json: bool
) -> None:
    """Build these shards, and print their sizes."""
    from cetane.files import size_of
    from cetane.pipeline.build import build_only

    with progress("build") as update:
        made = build_only(request.checkpoint, request.recipe, target, only, update, rebuild)
    sizes = {name: size_of(package) for name, package in made.items()}
    if json:
        print_json({"shards": {n: {"path": str(made[n]), "bytes": sizes[n]} for n in made}})
        return
    table("shards", ["name", "size"], [[name, megabytes(sizes[name])] for name in made])
    for package in made.values():
        say(str(package))
