"""cetane gc: what can be removed."""

from typing import Annotated

import typer

from cetane.cli.output import Json, console, megabytes, print_json, table
from cetane.doctor import clean, leftovers


def gc(
    remove: Annotated[bool, typer.Option("--remove", help="Remove it; else it is a dry run.")] = (
        False
    ),
    json: Json = False,
) -> None:
    """List what upgrades and killed conversions left, and remove it with --remove."""
    found = leftovers()
    if remove:
        clean(found)
    if json:
        items = [{"path": str(i.path), "bytes": i.bytes, "why": i.why} for i in found]
        print_json({"removed": remove, "leftovers": items})
        return
    if found:
        rows = [[megabytes(item.bytes), item.why, str(item.path)] for item in found]
        table("leftovers", ["size", "why", "path"], rows)
    total = megabytes(sum(item.bytes for item in found))
    done = f"removed {total}" if remove else f"{total} can go: cetane gc --remove"
    console.print(done if found else "nothing to remove")
