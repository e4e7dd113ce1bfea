"""The commands, by name. A command's module is imported when it is called: some need torch."""

import importlib
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

COMMANDS = {
    "inspect": "Show what a checkpoint holds, without reading weights.",
    "plan": "Show what a build would make and, for a chip, its predicted speed.",
    "vocabulary": "Choose the tokens that a head must have.",
    "sweep": "Judge many compressions of a model on a text, without building one, and choose.",
    "port": "Port a model: plan it, build it, and prove that the result is right.",
    "demo": "Port a model that needs no hub, judge it, and let it write.",
    "build": "Build a bundle, without gates.",
    "quantize-activations": "Give a bundle calibrated activations of 8 bits.",
    "audit": "Show where every op runs, on the ANE or elsewhere, and why; no Mac needed.",
    "validate": "Compare a bundle with the Hugging Face model.",
    "diff": "Compare two programs, or a bundle and its model, op by op.",
    "run": "Generate text from a bundle's Core ML packages, on any machine.",
    "bench": "Compare generation with drafts and without, prompt by prompt in one process.",
    "train-head": "Train a draft head and make it a shard of the bundle.",
    "lab": "Experiments as data: run them, judge them, keep a log.",
    "export": "Write Core ML programs as ONNX files, or a bundle for another runtime.",
    "info": "Show a bundle's manifest and gate results; every file's hash is checked.",
    "report": "Write one self-contained page about a bundle or an experiment.",
    "doctor": "Check versions, native libraries, disk, and what upgrades left.",
    "recompile": "Compile every shard anew and load it, as after an upgrade of the system (macOS).",
    "gc": "List what upgrades and killed conversions left, and remove it with --remove.",
}
"""What every command does, in a few words, so that the list of commands imports none of them.

A command is a function of that name in a module of that name, with underscores, or a module with
`commands` of its own."""


class Commands(TyperGroup):
    """Lists commands without importing them; imports the one that is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name]) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command and load(str(command.name)), rest


def load(name: str) -> Any:
    """The command itself."""
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    function = name.replace("-", "_")
    module = importlib.import_module(f"cetane.cli.{function}")
    if hasattr(module, "commands"):
        return typer.main.get_command(module.commands)
    single.command(name)(getattr(module, function))
    return typer.main.get_command(single)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Port language models to Apple's Neural Engine from any machine.",
)


@app.callback()
def cetane() -> None:
    """Port language models to Apple's Neural Engine from any machine."""
