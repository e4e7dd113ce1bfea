"""The command line: a command parses its options, calls the API and prints."""

import sys
import traceback
from typing import NoReturn

import typer
from rich.markup import escape

from cetane.cli.app import app
from cetane.cli.output import errors, print_json, warn
from cetane.errors import CetaneError, printable

FAULT, STOPPED = 3, 130


def main() -> None:
    """Run a command. Exit codes: 0 pass, 1 a gate failed, 2 wrong use or bad input, 3 a fault of
    cetane's own, 130 stopped."""
    try:
        code = app(prog_name="cetane", standalone_mode=False)
    except CetaneError as error:
        fail(error.message, error.hint)
    except typer.TyperException as error:  # an unknown option, or a value out of range
        fail(getattr(error, "format_message", error.__str__)(), usage(error))
    except OSError as error:  # an impossible path, or a disk that fails
        fail(str(error))
    except MemoryError:
        fail("there is not enough memory for this", "close other programs, or use a smaller model")
    except RecursionError:
        fail("the input is too deeply nested")
    except (KeyboardInterrupt, typer.Abort):
        code = STOPPED
    except Exception as error:
        warn(traceback.format_exc())
        fail(f"{type(error).__name__}: {error}", "this is a fault of cetane: report it", FAULT)
    if code == STOPPED:  # so typer ends a command on Ctrl-C
        warn("stopped")
    sys.exit(code)


def usage(error: typer.TyperException) -> str | None:
    """The advice to read the command's help; None without a command."""
    context = getattr(error, "ctx", None)
    return f"see {context.command_path} --help" if context else None


def fail(message: str, hint: str | None = None, code: int = 2) -> NoReturn:
    """Print an error, as JSON with --json, and end with an exit code."""
    if "--json" in sys.argv:
        print_json({"error": printable(message), "hint": None if hint is None else printable(hint)})
    lines = [f"[bold red]error[/]: {escape(printable(message))}"]
    if hint:
        lines.append(f"[dim]{escape(printable(hint))}[/]")
    for line in lines:
        errors.print(line, soft_wrap=True, highlight=False)
    sys.exit(code)
