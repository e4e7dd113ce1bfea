"""cetane gc: lists and removes leftovers."""

from typing import Annotated

import typer

from cetane.cli.options import Json
from cetane.cli.output import Unbroken, megabytes, print_json, say, table


def gc(
    remove: Annotated[bool, typer.Option("--remove", help="Remove them; else only list.")] = (
        False
    ),
    json: Json = False,
) -> None:
    """List leftovers, or remove them with --remove.

    They are of upgrades and of killed conversions.
    """
    from cetane.doctor import clean, leftovers

    items = leftovers()
    if remove:
        clean(items)
    if json:
        listed = [{"path": str(i.path), "bytes": i.bytes, "why": i.why} for i in items]
        print_json({"removed": remove, "leftovers": listed})
        return
    if items:
        rows = [[Unbroken(item.path), megabytes(item.bytes), item.why] for item in items]
        table("leftovers", ["path", "size", "why"], rows)
    total = megabytes(sum(item.bytes for item in items))
    done = f"removed {total}" if remove else f"{total} can go: cetane gc --remove"
    say(done if items else "nothing to remove")
