"""The command line: one thin file per command, no logic."""

import sys

from cetane.cli.app import app
from cetane.cli.output import errors
from cetane.errors import CetaneError


def main() -> None:
    """Run a command. Exit codes: 0 pass, 1 a gate failed, 2 wrong use or bad input."""
    try:
        app()
    except CetaneError as error:
        errors.print(f"[bold red]error[/]: {error.message}", soft_wrap=True, highlight=False)
        if error.hint:
            errors.print(f"[dim]{error.hint}[/]", soft_wrap=True, highlight=False)
        sys.exit(2)
    except KeyboardInterrupt:
        errors.print("stopped")
        sys.exit(130)
