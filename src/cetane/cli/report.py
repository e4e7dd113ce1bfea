"""cetane report: one HTML page about a bundle or an experiment."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cetane.cli.lab_folder import USUAL_FOLDER, FolderOption, lab_option, open_lab
from cetane.cli.options import Checkpoint, Json, MeasuredChip
from cetane.cli.output import finite, print_json, progress, say, say_next
from cetane.errors import CetaneError

if TYPE_CHECKING:
    from cetane.lab.entry import ExperimentReport
    from cetane.report.content.page import BundleReport


def report(
    subject: Annotated[
        str, typer.Argument(metavar="BUNDLE|EXPERIMENT", help="A bundle, or an experiment's id.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")],
    sweep: Annotated[
        Path | None,
        typer.Option(help="The folder or sweep.jsonl of cetane sweep, for quality against bits."),
    ] = None,
    bench: Annotated[
        Path | None, typer.Option(help="The output of cetane bench --json, for drafts.")
    ] = None,
    lab: FolderOption = USUAL_FOLDER,
    chip: MeasuredChip = None,
    model: Checkpoint = None,
    json: Json = False,
) -> None:
    """Write a page about a bundle or an experiment.

    The page needs no other file and no network. Its figures lie beside it as JSON.
    """
    from cetane.files import (
        check_outside,
        check_writable,
        disk_errors,
        make_folder_of,
        write_json,
        write_text,
    )  # fmt: skip
    from cetane.report.content.page import BundleReport
    from cetane.report.page import page

    if output.suffix != ".html":
        raise CetaneError(
            f"{output}: a page's name must end in .html", "its JSON is written beside it"
        )
    check_outside(output, Path(subject))  # a bundle lists its files
    check_writable(output)
    with progress("report"):
        content = collect(subject, sweep, bench, lab, chip, model)
    beside = output.with_suffix(".json")
    written, made = finite(content.model_dump(mode="json")), page(content)
    make_folder_of(output)
    with disk_errors(beside):
        write_json(beside, written)
    write_text(output, made)
    if json:
        print_json({"page": str(output), "json": str(beside)} | written)
    else:
        say(f"wrote {output}, and its figures in {beside}")
        if isinstance(content, BundleReport):
            say_next("export", subject, "--layout", "contract", "-o", f"{output.stem}-app")


def collect(
    subject: str,
    sweep: Path | None,
    bench: Path | None,
    lab: Path,
    chip: str | None,
    model: str | None,
) -> "BundleReport | ExperimentReport":
    """The content of a page about a bundle, or about an experiment."""
    from cetane.lab.entry import experiment_report
    from cetane.lab.experiment import ID

    if Path(subject).exists() or not re.fullmatch(ID, subject):
        return about_bundle(Path(subject), sweep, bench, chip, model)
    known = open_lab(lab)
    try:
        experiment = known.find(subject)
    except CetaneError as error:  # a missing bundle's name may look like an id too
        raise CetaneError(
            f"{subject}: no such bundle, and {error.message}", "cetane port MODEL makes a bundle"
        ) from error
    if sweep or bench or chip or model:
        raise CetaneError(
            f"{subject}: --sweep, --bench, --chip and --model are for a bundle's page"
        )
    return experiment_report(experiment, known.journal, lab_option(lab))


def about_bundle(
    path: Path, sweep: Path | None, bench: Path | None, chip: str | None, model: str | None
) -> "BundleReport":
    """The content of a bundle's page."""
    from cetane.bundle import Bundle
    from cetane.hardware.chips import find_chip
    from cetane.report.collect import bundle_report
    from cetane.report.user_files import read_benchmark, read_sweep

    bundle = Bundle(path)
    bundle.verify()
    return bundle_report(
        bundle,
        None if chip is None else find_chip(chip),
        model,
        None if sweep is None else read_sweep(sweep, bundle.manifest.fingerprint),
        None if bench is None else read_benchmark(bench, path),
    )
