"""Options that several commands share, so that one thing has one name everywhere."""

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print every table.")]
Model = Annotated[str, typer.Argument(help="A Hugging Face folder, a GGUF file, or a hub id.")]
BundlePath = Annotated[Path, typer.Argument(metavar="BUNDLE", help="A bundle.")]
Checkpoint = Annotated[
    str | None,
    typer.Option("--model", help="The checkpoint, if it is not where the build found it."),
]
RecipeName = Annotated[
    str,
    typer.Option("--recipe", "-r", help="A recipe by name (cetane recipes), or a .toml file."),
]
Context = Annotated[
    int | None,
    typer.Option(
        "--context",
        metavar="TOKENS",
        min=32,
        help="Most tokens of prompt and answer, in place of the recipe's.",
    ),
]
Bits = Annotated[
    int | None,
    typer.Option(
        "--bits",
        metavar="BITS",
        help="Bits of a weight, in place of the recipe's: 16, 8, 6, 4, 3 or 2.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any value of the recipe, as tokens.verify=8."),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="PATH",
        help="Where the bundle goes.",
        show_default="MODEL-RECIPE",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace another bundle at that place.")]
Rebuild = Annotated[
    bool,
    typer.Option(
        "--rebuild/--skip-existing", help="Make anew what an interrupted build left, or keep it."
    ),
]
ChipName = Annotated[
    str | None, typer.Option("--chip", help="A chip, as m4-max or a19-pro.", show_default="m4-max")
]
OsNumber = Annotated[float | None, typer.Option(min=1, help="The system's number, as iOS counts.")]
Quality = Annotated[
    str | None,
    typer.Option(
        "--quality",
        metavar="PROMISE",
        help="What is promised: near-lossless, good or usable, in place of the recipe's.",
    ),
]
Backend = Annotated[str, typer.Option(help="auto, portable (any machine) or coreml (a Mac).")]
MaxNew = Annotated[int, typer.Option("--max-new", min=1, help="Most tokens of an answer.")]
DraftTokens = Annotated[
    int | None, typer.Option(help="Most tokens of a draft.", show_default="verify - 1")
]
