"""cetane add-head: adds a trained draft head to a bundle."""

from typing import Annotated

import typer

from cetane.cli.options import BundlePath, Checkpoint, Json
from cetane.cli.output import conclude, progress
from cetane.cli.train_head import show_all


def add_head(
    bundle: BundlePath,
    trained: Annotated[
        str,
        typer.Argument(
            metavar="TRAINED",
            help="A bundle with draft heads, the folder of one, or smollm2-135m-instruct: that one "
            "comes with cetane.",
        ),
    ],
    model: Checkpoint = None,
    json: Json = False,
) -> None:
    """Add draft heads that were trained elsewhere.

    Nothing is trained. They must be of the same model, and read the hidden states of the same
    layers. Bits may differ. An added draft head replaces an earlier one of its kind. Exit code 1
    when the golden gate of one fails: then an earlier one stays.
    """

    with progress("add a draft head") as update:
        from cetane.pipeline.draft_head import add_draft_heads  # which imports for seconds

        added = add_draft_heads(bundle, trained, model=model, progress=update)
    conclude(added, json, lambda result: show_all(result.heads, bundle))
