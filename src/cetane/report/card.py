"""The model card of a folder for the Hugging Face hub, written from a bundle's gates."""

import json
import re
from collections.abc import Mapping
from typing import Literal

from cetane.bundle import Bundle
from cetane.checkpoint.names import HUB_ID, model_name
from cetane.hardware.chips import Chip
from cetane.report.collect import bundle_report
from cetane.report.content.page import KeyFigure
from cetane.report.sizes import by_part, plain_name
from cetane.templates import environment

FolderKind = Literal["bundle", "contract", "anemll", "coreml-llm"]
OUTCOMES = {"passed": "yes", "failed": "**no**", "not run": "not run"}


def card(
    bundle: Bundle, kind: FolderKind, repo: str, license: str | None, chip: Chip | None,
    files: Mapping[str, int],
) -> str:  # fmt: skip
    """The card as Markdown: where the model comes from, its quality, its sizes, how to run it.

    `license` is the id of the model's license on the hub; the card names none without it.
    `chip` is by default the measured one. `files` are the bytes of the files that go up, by path.
    """
    content = bundle_report(bundle, chip, None, None, None)
    parts = {part.name: part.bytes for part in content.sizes.parts}
    figures = content.figures
    if kind != "bundle":  # other files than the bundle's
        parts = {plain_name(part): size for part, size in by_part(files).items()}
        figures = tuple(resized(one, sum(files.values())) for one in figures)
    name = model_name(bundle.manifest.source)
    return (
        environment("cetane.report", {"harmless": harmless, "figure": figure, "quoted": json.dumps})
        .get_template("card.md.j2")
        .render(
            page=content,
            parts=parts,
            figures=figures,
            kind=kind,
            repo=repo,
            base=name if HUB_ID.fullmatch(name) else None,
            name=name,
            license=license,
            packages=any(".mlpackage/" in file for file in files),
            plan=bundle.plan,
            outcomes=OUTCOMES,
            producer=bundle.manifest.producer,
        )
    )


def resized(figure: KeyFigure, size: int) -> KeyFigure:
    """A figure; that of the size with these bytes."""
    return figure.model_copy(update={"value": size / 1e6}) if figure.name == "size" else figure


def harmless(text: str) -> str:
    """A text for a table or a line of Markdown: a manifest's names may hold any characters."""
    return re.sub(r"[^\w .,:;()/@+-]", "_", text)[:100]


def figure(value: KeyFigure) -> str:
    """A figure with its unit, and its limit."""
    bound = {"lower": "at most", "higher": "at least"}[value.better]
    limit = "" if value.limit is None else f" ({bound} {value.limit:.4g})"
    return f"{value.value:.4g} {value.unit}{limit}"
