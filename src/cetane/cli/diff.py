"""cetane diff: the first op where two programs part."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from cetane.cli.options import Json
from cetane.cli.output import print_json, progress

SecondOption = Annotated[
    Path | None, typer.Argument(help="What to compare with it; the same again, if none.")
]
ModelOption = Annotated[
    str | None, typer.Option(help="Compare the bundle with this checkpoint's model instead.")
]
FunctionOption = Annotated[
    str | None,
    typer.Option(help="A function of the packages, a mode of the bundles.", show_default="main"),
]
PrecisionOption = Annotated[
    Literal["fp32", "fp16"] | None,
    typer.Option(help="How the second side runs; the first runs in fp32.", show_default="fp32"),
]
InputsOption = Annotated[
    Path | None, typer.Option(help="An .npz with an array for each input; else random ones.")
]
ToleranceOption = Annotated[
    float | None,
    typer.Option(
        min=0, help="Relative error of one op that means nothing; fifty times that add up."
    ),
]


def diff(
    first: Annotated[Path, typer.Argument(help="The side that is right: a package or a bundle.")],
    second: SecondOption = None,
    model: ModelOption = None,
    function: FunctionOption = None,
    precision: PrecisionOption = None,
    inputs: InputsOption = None,
    tolerance: ToleranceOption = None,
    top: Annotated[int, typer.Option(min=1, help="How many ops to list.")] = 10,
    json: Json = False,
) -> None:
    """Compare two programs op by op, or a bundle with its model: the first op where they part.

    Exit code 1 if anything is off by more than the tolerance.
    """
    from cetane.cli.diff_tables import show
    from cetane.mil.compare import TOLERANCE
    from cetane.pipeline.diff import diff as compare

    with progress("diff") as update:
        result = compare(
            first, second, model=model, function=function, precision=precision, inputs=inputs,
            tolerance=TOLERANCE if tolerance is None else tolerance, progress=update,
        )  # fmt: skip
    if json:
        print_json(result.as_json(top))
    else:
        show(result, top)
    raise typer.Exit(0 if result.passed else 1)
