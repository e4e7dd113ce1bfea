"""cetane validate: runs the gates of a finished bundle."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypedDict

import typer

from cetane.cli.options import (
    Adapters,
    Checkpoint,
    Json,
    Lora,
    Verbose,
    parse_adapters,
    parse_ids,
    refuse,
)
from cetane.cli.output import (
    conclude,
    console,
    facts,
    follow_run,
    print_json,
    progress,
    say,
    show_warnings,
    verdict,
    warn,
)
from cetane.errors import CetaneError

if TYPE_CHECKING:
    from cetane.gates.layers import LayersResult
    from cetane.gates.quality import TextQuality
    from cetane.pipeline.validate import Validation

TOKENS = 20_000
"""The most tokens of a text, by default."""


class Ported(TypedDict):
    """New places of the checkpoint and of adapters, by the names of the API."""

    model: str | None
    lora: Path | None
    adapters: dict[str, str]


def validate(
    bundle: Annotated[
        Path,
        typer.Argument(metavar="BUNDLE", help="A bundle, or a folder for ANEMLL or CoreML-LLM."),
    ],
    model: Checkpoint = None,
    lora: Lora = None,
    adapter: Adapters = None,
    text: Annotated[
        Path | None,
        typer.Option("--perplexity", help="Measure perplexity on a text file instead."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="The most tokens of the text.")] = TOKENS,
    layer: Annotated[
        int | None,
        typer.Option("--layer", metavar="N", help="Only the shard that holds block N, alone."),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Only every shard, each alone.")] = False,
    prompt_ids: Annotated[
        str | None,
        typer.Option(
            "--prompt-ids", metavar="IDS", help="With --layer or --full: tokens, as 1,1000,5000."
        ),
    ] = None,
    n_probes: Annotated[
        int,
        typer.Option(
            "--n-probes", min=1, help="With --layer or --full: how many random sequences to run."
        ),
    ] = 1,
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """Compare a bundle with the Hugging Face model, and its draft heads with the trained ones.

    First, its packages and tables are compared with its manifest and with each other. Exit code 1
    when a gate fails.

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
    if (layer is not None) + full + (text is not None) > 1:
        raise CetaneError("--layer, --full and --perplexity exclude each other")
    if text is None:
        refuse("is for --perplexity", {"--tokens": tokens != TOKENS})
    ported = Ported(model=model, lora=lora, adapters=parse_adapters(adapter))
    if layer is not None or full:
        ids = [] if prompt_ids is None else parse_ids(prompt_ids)
        return validate_alone(bundle, ported, layer, ids, n_probes, json)
    alone = {"--prompt-ids": prompt_ids is not None, "--n-probes": n_probes > 1}
    refuse("is for --layer and --full", alone)
    if text is not None:
        return validate_perplexity(bundle, ported, text, tokens, json)
    return validate_gates(bundle, ported, verbose, json)


def validate_alone(
    bundle: Path, ported: Ported, block: int | None, ids: list[int], probes: int, json: bool
) -> None:
    """Judge the shard of one block, or every shard, each alone."""
    from cetane.pipeline.validate import validate_layers

    with progress("validate") as update:
        judged = validate_layers(
            bundle, block=block, prompt_ids=ids, probes=probes, progress=update, **ported
        )
    conclude(judged, json, show_layers)


def validate_perplexity(bundle: Path, ported: Ported, text: Path, tokens: int, json: bool) -> None:
    """Measure perplexity on a text."""
    from cetane.pipeline.validate import perplexity

    with progress("perplexity") as update:
        quality = perplexity(bundle, text, tokens=tokens, progress=update, **ported)
    show_perplexity(quality, json)


def validate_gates(bundle: Path, ported: Ported, verbose: bool, json: bool) -> None:
    """Ask all gates of a finished bundle."""
    from cetane.pipeline.validate import validate as judge

    with progress("validate") as update:
        result = judge(bundle, progress=update, **ported)
    conclude(result, json, lambda outcome: show(outcome, verbose, bundle))


def show_layers(result: "LayersResult") -> None:
    """Print every shard, then the line that the published validator ends with."""
    from cetane.cli.gate_tables import show_model

    show_model(result.source, result.fingerprint)
    show_warnings(result.warnings)
    for one in result.screened:
        warn(f"token {one.token} is left out: {one.reason}")
    for score in result.shards:
        console.print(
            f"{score.shard}: {verdict(score.passed)}, mean {score.mean:.6f}, min {score.min:.6f}"
        )
    say(result.line)


def validate_folder(folder: Path, json: bool) -> None:
    """Check a folder that an app loads: its config, its packages, and how they fit together."""
    from cetane.cli.export import show as show_folder
    from cetane.pipeline.runtime_folder import check_folder

    conclude(check_folder(folder), json, show_folder)


def show_perplexity(quality: "TextQuality", json: bool) -> None:
    """Print perplexities, and exit."""
    if json:
        print_json({"perplexity": quality.model_dump(mode="json")})
    else:
        show_warnings(quality.warnings)
        values = quality.model_dump(exclude={"passed", "warnings"})
        facts({name.replace("_", " "): value for name, value in values.items()}, "perplexity")
        console.print(f"perplexity: {verdict(quality.passed)}")
    raise typer.Exit(0 if quality.passed else 1)


def show(result: "Validation", verbose: bool, bundle: Path) -> None:
    """Print every gate, and what follows."""
    from cetane.cli.gate_tables import show_golden, show_head, show_model, show_why

    for finding in result.static:
        warn(str(finding))
    if result.golden is None:
        console.print(f"static checks: {verdict(False)}")
        return
    show_model(result.golden.source, result.golden.fingerprint)
    show_golden(result.golden, verbose)
    show_why(result.explanation)
    for kind, head in result.heads.items():
        show_head(kind, head)
    if result.passed:
        follow_run(bundle)
