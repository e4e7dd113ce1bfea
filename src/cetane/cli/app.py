"""The application: all commands by name, and their panels in `cetane --help`.

A command's module is imported when it is called or listed. None of them imports torch, transformers
or coremltools at its top.
"""

import importlib
import keyword
import math
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup


class Listed(NamedTuple):
    """A command's panel in `cetane --help`, and an example of its use."""

    panel: str
    example: str


COMMANDS = {
    "demo": Listed("Port", "cetane demo"),
    "plan": Listed("Port", "cetane plan HuggingFaceTB/SmolLM2-135M-Instruct --chip a19-pro"),
    "port": Listed("Port", "cetane port HuggingFaceTB/SmolLM2-135M-Instruct -o smollm2"),
    "build": Listed("Port", "cetane build model.gguf --only 'chunk-*' -o model"),
    "recipes": Listed("Port", "cetane recipes"),
    "inspect": Listed("Port", "cetane inspect model.gguf"),
    "validate": Listed("Judge", "cetane validate smollm2 --perplexity book.txt"),
    "audit": Listed("Judge", "cetane audit smollm2 --chip a19-pro"),
    "diff": Listed("Judge", "cetane diff smollm2 --model HuggingFaceTB/SmolLM2-135M-Instruct"),
    "eval": Listed("Judge", "cetane eval smollm2 --against reference"),
    "info": Listed("Judge", "cetane info smollm2"),
    "report": Listed("Judge", "cetane report smollm2 -o smollm2.html"),
    "run": Listed("Run", "cetane run smollm2 'What is the capital of France?'"),
    "serve": Listed("Run", "cetane serve smollm2"),
    "bench": Listed("Run", "cetane bench smollm2 --drafters ngram,union"),
    "break-even": Listed("Run", "cetane break-even --t1 109 --tv 483 --k 4"),
    "export": Listed("Run", "cetane export smollm2 --layout anemll -o smollm2-anemll"),
    "push": Listed("Run", "cetane push smollm2 me/smollm2-ane --dry-run"),
    "kit": Listed("Mac", "cetane kit smollm2 smollm2-int8 -o kit.zip"),
    "import": Listed("Mac", "cetane import measurements.json smollm2"),
    "sweep": Listed("Research", "cetane sweep model.gguf --budget 4.25 -o sweep"),
    "vocabulary": Listed("Research", "cetane vocabulary model.gguf --text book.txt -o subset.json"),
    "heads": Listed("Research", "cetane heads model.gguf -o heads.json"),
    "quantize-activations": Listed(
        "Research", "cetane quantize-activations smollm2 --smooth -o smollm2-a8"
    ),
    "add-head": Listed("Research", "cetane add-head smollm2 smollm2-135m-instruct"),
    "train-head": Listed("Research", "cetane train-head smollm2 eagle3 --text book.txt"),
    "lab": Listed("Research", "cetane lab run int8-weights"),
    "doctor": Listed("Upkeep", "cetane doctor"),
    "gc": Listed("Upkeep", "cetane gc --remove"),
    "recompile": Listed("Upkeep", "cetane recompile smollm2"),
}
"""Each name is a module (with underscores) that has a function of that name, or `commands` of its
own. A word of Python, such as `import`, ends with an underscore there."""


class Command(TyperCommand):
    """A command that refuses numbers that are not finite."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        for param in self.params:
            value = ctx.params.get(param.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise typer.BadParameter(
                    f"{value} is not a finite number", ctx, param_hint=param.name
                )
        return rest


class Commands(TyperGroup):
    """Finds a command by importing its module."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        names: Any = dict.fromkeys(COMMANDS)
        self.commands = names  # from which typer guesses a misspelt name

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        panel, example = COMMANDS[cmd_name]
        name = cmd_name.replace("-", "_") + "_" * keyword.iskeyword(cmd_name)
        module = importlib.import_module(f"cetane.cli.{name}")
        if hasattr(module, "commands"):
            group: Any = typer.main.get_command(module.commands)
            group.name, group.rich_help_panel = cmd_name, panel
            group.help = module.commands.info.help
            return group
        single = typer.Typer(
            add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
        )
        function = getattr(module, name)
        single.command(
            cmd_name, cls=Command, help=paragraphs(function.__doc__ or ""), rich_help_panel=panel,
            epilog=f"Example: {example}",
        )(function)  # fmt: skip
        return typer.main.get_command(single)


def paragraphs(text: str) -> str:
    """A docstring with one line for each paragraph, so that the terminal's width breaks it."""
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    epilog="Start with [bold]cetane demo[/]. Exit codes: 0 pass, 1 a gate failed, 2 wrong use or "
    "bad input, 3 a fault of cetane, 130 stopped by Ctrl-C, 141 the reader of the output left.",
)


@app.callback(invoke_without_command=True)
def cetane(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)
    ] = False,
) -> None:
    """Port language models to Apple's Neural Engine from any machine."""
    if version:
        from cetane import __version__

        print(f"cetane {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
