"""The command line: one thin file per command, no logic."""

import sys
from typing import NoReturn

from rich.markup import escape

from cetane.cli.app import app
from cetane.cli.output import errors
from cetane.errors import CetaneError


def main() -> None:
    """Run a command. Exit codes: 0 pass, 1 a gate failed, 2 wrong use or bad input."""
    try:
        app(prog_name="cetane")
    except CetaneError as error:
        fail(error.message, error.hint)
    except OSError as error:  # a path that no file system takes, a disk that breaks
        fail(str(error))
    except KeyboardInterrupt:
        errors.print("stopped")
        sys.exit(130)


def fail(message: str, hint: str | None = None) -> NoReturn:
    """Say what is wrong, and end with exit code 2."""
    lines = [f"[bold red]error[/]: {escape(one_line(message))}"]
    if hint:
        lines.append(f"[dim]{escape(one_line(hint))}[/]")
    for line in lines:
        errors.print(line, soft_wrap=True, highlight=False)
    sys.exit(2)


def one_line(text: str) -> str:
    """`text` without its line breaks and indentation."""
    return " ".join(text.split())
