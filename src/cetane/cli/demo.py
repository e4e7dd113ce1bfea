"""cetane demo: a model that needs no hub, from checkpoint to text."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from cetane.cli.build import Output
from cetane.cli.output import console
from cetane.cli.port import port
from cetane.cli.run import run
from cetane.errors import CetaneError
from cetane.lab.workload import smollm2, zaya_tiny


@dataclass(frozen=True)
class Demo:
    """A model, the recipe that shows it best, and something to ask it."""

    find: Callable[[], Path]
    recipe: str
    prompt: str


DEMOS = {
    "zaya-tiny": Demo(zaya_tiny, "zaya-routed", "def __init__(self"),
    "smollm2": Demo(smollm2, "default", "What is the capital of France?"),
}


def demo(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(DEMOS)}.")] = "zaya-tiny",
    recipe: Annotated[
        str | None, typer.Option("--recipe", "-r", help="Another recipe than the demo's own.")
    ] = None,
    output: Output = None,
) -> None:
    """Port a model that needs no hub, judge it, and let it write."""
    if model not in DEMOS:
        raise CetaneError(f"no demo of {model!r}; known: {', '.join(DEMOS)}")
    shown = DEMOS[model]
    chosen = recipe or shown.recipe
    bundle = output or Path(f"{model}-{Path(chosen).stem}")
    try:
        port(str(shown.find()), bundle, chosen)
    except typer.Exit as verdict:
        if verdict.exit_code:
            raise
    console.print(f"[bold]{shown.prompt}[/]", highlight=False)
    run(bundle, shown.prompt, max_new=48)
