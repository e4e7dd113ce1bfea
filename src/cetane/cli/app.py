"""The commands, by name. A command's module is imported when it is called: some need torch."""

import importlib
from typing import Any

import typer
from typer.core import TyperGroup

COMMANDS = (
    "inspect", "plan", "port", "demo", "build", "audit", "validate", "sweep", "diff", "run",
    "bench", "train-head", "lab", "export", "info", "report", "doctor", "recompile", "gc",
)  # fmt: skip
"""Each is a function of that name in a module of that name, with underscores, or a module with
`commands` of its own."""


class Commands(TyperGroup):
    """Finds a command by importing its module."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        name = cmd_name.replace("-", "_")
        module = importlib.import_module(f"cetane.cli.{name}")
        if hasattr(module, "commands"):
            return typer.main.get_command(module.commands)
        single.command(cmd_name)(getattr(module, name))
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
