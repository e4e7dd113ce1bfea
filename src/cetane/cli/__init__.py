"""The command line: a command parses its options, calls the API and prints."""

import errno
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from typing import TextIO

import typer
from rich.markup import escape

from cetane.cli.app import app
from cetane.cli.output import errors, print_json, warn
from cetane.errors import SET_TMPDIR, CetaneError, printable

FAULT, STOPPED = 3, 130
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a file that takes no more."""
UNREAD = 141
"""As if SIGPIPE had ended it: the reader of the output, such as `head`, has left."""


def main() -> None:
    """Run a command. Exit codes: 0 pass, 1 a gate failed, 2 wrong use or bad input, 3 a fault of
    cetane's own, 130 stopped, 141 nobody reads the output."""
    open_streams()
    sys.unraisablehook = stop_again
    if isinstance(sys.stdout, TextIOWrapper):  # a model writes what not every terminal can show
        sys.stdout.reconfigure(errors="replace")
    try:
        code = command()
        for stream in (sys.stdout, sys.stderr):
            with best_effort(stream):
                stream.flush()
    except (BrokenPipeError, SystemExit) as ended:
        # On a closed pipe, rich and typer end with 1, the code of a red gate.
        if not any(isinstance(one, BrokenPipeError) for one in (ended, ended.__context__)):
            raise
        drop(sys.stdout)
        drop(sys.stderr)
        code = UNREAD
    sys.exit(code)


def open_streams() -> None:
    """Lead closed standard streams to the null device: a file that is opened next would take their
    numbers, and so what is printed."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def stop_again(dropped: "sys.UnraisableHookArgs") -> None:
    """Send Ctrl-C again soon, where Python would print a traceback and go on: it came in a callback
    of a weak reference, of which every import has one."""
    if issubclass(dropped.exc_type, KeyboardInterrupt):
        # not at once: the callback may still run, which would drop it again
        threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
    else:
        sys.__unraisablehook__(dropped)


@contextmanager
def best_effort(stream: TextIO) -> Iterator[None]:
    """A context that writes to `stream`, and gives the stream up if its disk is full."""
    try:
        yield
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError:
        drop(stream)


def drop(stream: TextIO) -> None:
    """Lead a stream's file to the null device: Python flushes what is left at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def command() -> int:
    """Run a command, and return its exit code."""
    try:
        code: int = app(prog_name="cetane", standalone_mode=False) or 0
        sys.stdout.flush()
    except CetaneError as error:
        return fail(error.message, error.hint)
    except typer.TyperException as error:  # an unknown option, or a value out of range
        from cetane.validation import plain  # here, since it loads pydantic

        told = getattr(error, "format_message", error.__str__)()
        return fail(plain(told), usage(error))  # typer prints what pydantic says
    except BrokenPipeError:
        raise
    except OSError as error:  # an impossible path, or a disk that fails
        return fail(*of_the_system(error))
    except MemoryError:
        return fail(
            "there is not enough memory for this", "close other programs, or use a smaller model"
        )
    except RecursionError:
        return fail("the input is too deeply nested")
    except (KeyboardInterrupt, typer.Abort):
        code = STOPPED
    except Exception as error:
        with best_effort(sys.stderr):
            warn(traceback.format_exc())
        return fail(
            f"{type(error).__name__}: {error}", "this is a fault of cetane: report it", FAULT
        )
    if code == STOPPED:  # so typer ends a command on Ctrl-C
        with best_effort(sys.stderr):
            warn("stopped")
    return code


def of_the_system(error: OSError) -> tuple[str, str | None]:
    """What went wrong in the system, and what to do about it, if that is known."""
    if "No usable temporary directory" in str(error):
        return str(error), SET_TMPDIR
    if error.errno in FULL and error.filename is None:  # errors of other files name their file
        return (
            f"cannot write the output: {os.strerror(error.errno)}",
            "free some space where it goes, or send it elsewhere",
        )
    return str(error), None


def usage(error: typer.TyperException) -> str | None:
    """The advice to read the command's help; None without a command."""
    context = getattr(error, "ctx", None)
    return f"see {context.command_path} --help" if context else None


def fail(message: str, hint: str | None = None, code: int = 2) -> int:
    """Print an error, as JSON with --json. Returns the exit code."""
    if "--json" in sys.argv:
        with best_effort(sys.stdout):
            print_json(
                {"error": printable(message), "hint": None if hint is None else printable(hint)}
            )
    with best_effort(sys.stderr):
        lines = [f"[bold red]error[/]: {escape(printable(message))}"]
        if hint:
            lines.append(f"[dim]{escape(printable(hint))}[/]")
        for line in lines:
            errors.print(line, soft_wrap=True, highlight=False)
    return code
