"""cetane validate: runs the gates of a finished bundle."""

from pathlib import Path
from typing import Annotated, TypedDict

import typer

from cetane.cli.options import (
    Checkpoint,
    Json,
    MovedAdapters,
    MovedLora,
    Verbose,
    a_bundle,
    parse_adapters,
    parse_ids,
    refuse,
)
from cetane.cli.output import conclude, print_json, progress
from cetane.errors import CetaneError

TOKENS = 20_000
"""The most tokens of a text, by default."""


class MovedFiles(TypedDict):
    """New places of the checkpoint and of adapters, by the names of the API."""

    model: str | None
    lora: Path | None
    adapters: dict[str, str]


TextOption = Annotated[
    Path | None, typer.Option("--perplexity", help="Measure perplexity on a text file instead.")
]
LayerOption = Annotated[
    int | None,
    typer.Option("--layer", metavar="N", help="Only the shard that holds block N, alone."),
]
PromptIdsOption = Annotated[
    str | None,
    typer.Option(
        "--prompt-ids", metavar="IDS", help="With --layer or --full: tokens, as 1,1000,5000."
    ),
]
ProbesOption = Annotated[
    int,
    typer.Option(
        "--n-probes", min=1, help="With --layer or --full: how many random sequences to run."
    ),
]


def validate(
    bundle: Annotated[
        Path,
        typer.Argument(metavar="BUNDLE", help="A bundle, or a folder for ANEMLL or CoreML-LLM."),
    ],
    model: Checkpoint = None,
    lora: MovedLora = None,
    adapter: MovedAdapters = None,
    text: TextOption = None,
    tokens: Annotated[int, typer.Option(min=2, help="The most tokens of the text.")] = TOKENS,
    layer: LayerOption = None,
    full: Annotated[bool, typer.Option("--full", help="Only every shard, each alone.")] = False,
    prompt_ids: PromptIdsOption = None,
    n_probes: ProbesOption = 1,
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """Compare a bundle with the Hugging Face model.

    First, it compares packages and tables with the manifest and with each other. It also compares
    draft heads with the trained ones. Exit code 1 when a gate fails.

    --layer and --full judge shards alone, each on the model's own tensors. They take seconds, and
    prove less.
    """
    from cetane.schema.manifest import CONFIGS

    if any((bundle / name).is_file() for name in CONFIGS):
        refuse(
            "is for bundles, and this is an app's folder",
            {
                "--model": model, "--lora": lora, "--adapter": adapter, "--perplexity": text,
                "--tokens": tokens != TOKENS, "--layer": layer is not None, "--full": full,
                "--prompt-ids": prompt_ids is not None, "--n-probes": n_probes > 1,
            },
        )  # fmt: skip
        return validate_folder(bundle, json)
    a_bundle(bundle)
    if (layer is not None) + full + (text is not None) > 1:
        raise CetaneError("--layer, --full and --perplexity exclude each other")
    if text is None:
        refuse("is for --perplexity", {"--tokens": tokens != TOKENS})
    moved = MovedFiles(model=model, lora=lora, adapters=parse_adapters(adapter))
    if layer is not None or full:
        ids = [] if prompt_ids is None else parse_ids(prompt_ids)
        return validate_alone(bundle, moved, layer, ids, n_probes, json)
    alone = {"--prompt-ids": prompt_ids is not None, "--n-probes": n_probes > 1}
    refuse("is for --layer and --full", alone)
    if text is not None:
        return validate_perplexity(bundle, moved, text, tokens, json)
    return validate_gates(bundle, moved, verbose, json)


def validate_alone(
    bundle: Path, moved: MovedFiles, block: int | None, ids: list[int], probes: int, json: bool
) -> None:
    """Judge the shard of one block, or every shard, each alone."""
    from cetane.cli.validate_tables import show_layers

    with progress("validate") as update:
        from cetane.pipeline.validate import validate_layers  # which imports for seconds

        judged = validate_layers(
            bundle, block=block, prompt_ids=ids, probes=probes, progress=update, **moved
        )
    conclude(judged, json, show_layers)


def validate_perplexity(
    bundle: Path, moved: MovedFiles, text: Path, tokens: int, json: bool
) -> None:
    """Measure perplexity on a text."""
    from cetane.cli.validate_tables import show_perplexity

    with progress("perplexity") as update:
        from cetane.pipeline.validate import perplexity  # which imports for seconds

        quality = perplexity(bundle, text, tokens=tokens, progress=update, **moved)
    if json:
        print_json({"perplexity": quality.model_dump(mode="json")})
    else:
        show_perplexity(quality)
    raise typer.Exit(0 if quality.passed else 1)


def validate_gates(bundle: Path, moved: MovedFiles, verbose: bool, json: bool) -> None:
    """Ask all gates of a finished bundle."""
    from cetane.cli.validate_tables import show_gates

    with progress("validate") as update:
        from cetane.pipeline.validate import validate as judge  # which imports for seconds

        result = judge(bundle, progress=update, **moved)
    conclude(result, json, lambda outcome: show_gates(outcome, verbose, bundle))


def validate_folder(folder: Path, json: bool) -> None:
    """Check a folder that an app loads: its config, its packages, and how they fit together."""
    from cetane.cli.export import show as show_folder
    from cetane.pipeline.runtime_folder import check_folder

    conclude(check_folder(folder), json, show_folder)
