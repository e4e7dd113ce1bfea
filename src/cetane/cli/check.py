"""cetane check: says what is wrong with a folder that an app loads."""

from pathlib import Path
from typing import Annotated

import typer

from cetane.cli.export import show
from cetane.cli.options import Json
from cetane.cli.output import conclude


def check(
    folder: Annotated[Path, typer.Argument(help="A folder for ANEMLL or CoreML-LLM.")],
    json: Json = False,
) -> None:
    """Check a folder that an app loads: its config, its packages, and how they fit together.

    Nothing runs, and no weights are read. Exit code 1 if something is wrong.
    """
    from cetane.pipeline.export import check_folder

    conclude(check_folder(folder), json, show)
