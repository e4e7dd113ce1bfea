"""The folder of a lab: how a command opens it, and how the next command names it."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cetane.cli.output import warn
from cetane.errors import CetaneError

if TYPE_CHECKING:
    from cetane.lab.library import Lab

USUAL_FOLDER = Path("experiments")
FolderOption = Annotated[
    Path, typer.Option("--lab", help="The folder of your experiments and your journal.")
]


def open_lab(folder: Path, new: bool = False) -> "Lab":
    """A lab. A last line of its journal that a power loss cut off is set aside.

    Raises CetaneError for another folder than the usual one that does not exist, unless it may be
    `new`.
    """
    from cetane.lab.library import Lab

    if not new and folder != USUAL_FOLDER and not folder.exists():
        raise CetaneError(f"{folder}: no such folder", "--lab names the folder of your experiments")
    lab = Lab(folder)
    lost = lab.journal.repair()
    if lost:
        warn(
            f"{lab.journal.path}: the last line was cut off; its {lost} bytes are in "
            f"{lab.journal.broken}"
        )
    return lab


def other_folder(lab: Path) -> Path | None:
    """The folder of a lab, if a command must name it."""
    return None if lab == USUAL_FOLDER else lab


def lab_option(lab: Path) -> str:
    """The option that names a lab, after a space; empty if no command needs it."""
    folder = other_folder(lab)
    return "" if folder is None else f" --lab {shlex.quote(str(folder))}"
