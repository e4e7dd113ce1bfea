"""cetane report: a page to look at."""

import re
from pathlib import Path
from typing import Annotated

import typer

from cetane.bundle import Bundle
from cetane.cli.lab import HERE, FolderOption, journal_of, library
from cetane.cli.output import Json, console, finite, print_json
from cetane.errors import CetaneError
from cetane.files import replacing, write_json
from cetane.hardware.chips import DEFAULT_CHIP, find_chip
from cetane.lab.entry import ExperimentReport, experiment_report
from cetane.lab.experiment import find_experiment
from cetane.report.collect import bundle_report
from cetane.report.content import BundleReport
from cetane.report.given import read_benchmark, read_sweep
from cetane.report.page import page

ID = re.compile(r"[a-z0-9][a-z0-9-]*")
"""An experiment's; a path that is not there looks otherwise, or nearly."""


def report(
    subject: Annotated[
        str, typer.Argument(metavar="BUNDLE|EXPERIMENT", help="A bundle, or an experiment's id.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")],
    sweep: Annotated[
        Path | None, typer.Option(help="What cetane sweep wrote, for quality against bits.")
    ] = None,
    bench: Annotated[
        Path | None, typer.Option(help="What cetane bench --json printed, for drafts.")
    ] = None,
    lab: FolderOption = HERE,
    chip: Annotated[str, typer.Option(help="The chip that is predicted.")] = DEFAULT_CHIP,
    model: Annotated[
        str | None, typer.Option(help="The checkpoint, if it is not where the build found it.")
    ] = None,
    json: Json = False,
) -> None:
    """Write one self-contained page about a bundle or an experiment, and its figures as JSON beside
    it."""
    if output.suffix != ".html":
        raise CetaneError(f"{output}: a page ends in .html", "its JSON lies beside it")
    content: BundleReport | ExperimentReport
    if Path(subject).exists() or not ID.fullmatch(subject):
        content = about_bundle(Path(subject), sweep, bench, chip, model)
    else:
        if sweep or bench or model:
            raise CetaneError(f"{subject}: --sweep, --bench and --model are for a bundle's page")
        content = experiment_report(find_experiment(library(lab), subject), journal_of(lab))
    beside = output.with_suffix(".json")
    output.parent.mkdir(parents=True, exist_ok=True)
    written = finite(content.model_dump(mode="json"))
    write_json(beside, written)
    with replacing(output) as temporary:
        temporary.write_text(page(content), encoding="utf-8")
    if json:
        print_json({"page": str(output), "json": str(beside)} | written)
    else:
        console.print(f"{output}, and its figures in {beside}", markup=False, soft_wrap=True)


def about_bundle(
    path: Path, sweep: Path | None, bench: Path | None, chip: str, model: str | None
) -> BundleReport:
    """The content of a bundle's page."""
    bundle = Bundle(path)
    return bundle_report(
        bundle,
        find_chip(chip),
        model,
        None if sweep is None else read_sweep(sweep, bundle.manifest.fingerprint),
        None if bench is None else read_benchmark(bench, path),
    )
