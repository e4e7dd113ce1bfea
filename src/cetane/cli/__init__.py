"""The command line: one thin file per command, no logic."""

import sys

from rich.markup import escape

from cetane.cli.app import app
from cetane.cli.output import errors
from cetane.errors import CetaneError


def main() -> None:
    """Run a command. Exit codes: 0 pass, 1 a gate failed, 2 wrong use or bad input."""
    try:
        app(prog_name="cetane")
    except CetaneError as error:
        lines = [f"[bold red]error[/]: {escape(one_line(error.message))}"]
        if error.hint:
            lines.append(f"[dim]{escape(one_line(error.hint))}[/]")
        for line in lines:
            errors.print(line, soft_wrap=True, highlight=False)
        sys.exit(2)
    except KeyboardInterrupt:
        errors.print("stopped")
        sys.exit(130)


def one_line(text: str) -> str:
    return " ".join(text.split())
