"""cetane diff: the first op where two programs differ."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from cetane.cli.options import Json
from cetane.cli.output import print_json, progress

SecondOption = Annotated[
    Path | None,
    typer.Argument(
        metavar="SECOND",
        exists=True,
        help="The side to judge; by default the first side, at another precision.",
    ),
]
ModelOption = Annotated[
    str | None, typer.Option(help="Compare the bundle with this checkpoint's model instead.")
]
FunctionOption = Annotated[
    str | None,
    typer.Option(
        help="A function of the packages, or a mode of the bundles.",
        show_default="a package's own default, the widest mode",
    ),
]
PrecisionOption = Annotated[
    Literal["fp32", "fp16", "ane"] | None,
    typer.Option(help="The second side's precision; the first runs in fp32.", show_default="fp32"),
]
InputsOption = Annotated[
    Path | None,
    typer.Option(help="An .npz with an array for each input; by default random arrays."),
]
ToleranceOption = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="Allowed relative error of one op; all ops together may have fifty times it.",
        show_default="0.001",
    ),
]


def diff(
    first: Annotated[
        Path,
        typer.Argument(
            metavar="FIRST", exists=True, help="The correct side: a package or a bundle."
        ),
    ],
    second: SecondOption = None,
    model: ModelOption = None,
    function: FunctionOption = None,
    precision: PrecisionOption = None,
    inputs: InputsOption = None,
    tolerance: ToleranceOption = None,
    top: Annotated[int, typer.Option(min=1, help="The number of ops to list.")] = 10,
    json: Json = False,
) -> None:
    """Find the first op where two programs differ.

    It also compares a bundle with its model, and finds the shard, the step of the port and the op
    that err. Exit code 1 if anything differs by more than the tolerance.
    """
    from cetane.cli.diff_tables import show

    with progress("diff") as update:
        from cetane.mil.comparison import TOLERANCE
        from cetane.pipeline.diff import diff as compare  # which imports for seconds

        result = compare(
            first, second, model=model, function=function, precision=precision, inputs=inputs,
            tolerance=TOLERANCE if tolerance is None else tolerance, progress=update,
        )  # fmt: skip
    if json:
        print_json(result.as_json(top))
    else:
        show(result, top)
    raise typer.Exit(0 if result.passed else 1)
