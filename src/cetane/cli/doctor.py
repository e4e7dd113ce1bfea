"""cetane doctor: checks whether this machine can port and run."""

from dataclasses import asdict

import typer

from cetane.cli.options import Json
from cetane.cli.output import print_json, table


def doctor(json: Json = False) -> None:
    """Check versions, libraries, disk space and leftovers.

    Exit code 1 on a failure.
    """
    from cetane.doctor import diagnose

    checks = diagnose()
    if json:
        print_json([asdict(check) for check in checks])
    else:
        rows = [[check.state, check.name, check.value, check.hint] for check in checks]
        table("this machine", ["state", "what", "has", "hint"], rows)
    raise typer.Exit(1 if any(check.state == "failure" for check in checks) else 0)
