"""The decision log, docs/reference/decision-log.md, made only from experiments and the journal.

The words are in `templates/`; this module formats the figures.
"""

from collections.abc import Iterable, Iterator
from functools import cache

from jinja2 import Environment

from cetane import templates
from cetane.lab.entry import ArmTexts, entries
from cetane.lab.experiment import Arm, ArmName, Experiment
from cetane.lab.journal import Figure, Journal
from cetane.lab.library import load_experiments, shipped_experiments

ANSWERS = 3
"""The number of an arm's answers that the page shows; the journal has all."""
MARKS = str.maketrans("\n`|<", "⏎'¦‹")
"""What an answer has in place of marks that end a code span or a cell, or that are escaped."""
LONG = 8
"""The most values of a list that are shown."""


def markdown(experiments: dict[str, Experiment], journal: Journal) -> str:
    """The page. The same files always give the same page."""
    reports = [entry.report() for entry in entries(experiments.values(), journal)]
    published = load_experiments(shipped_experiments()).keys() <= experiments.keys()
    return environment().get_template("log.md.j2").render(reports=reports, published=published)


@cache
def environment() -> Environment:
    """The templates, with their filters."""
    filters = {
        "cell": cell,
        "change_texts": change_texts,
        "extras": extras,
        "in_cell": in_cell,
        "line": line,
        "quoted": quoted,
        "short": short,
        "texts": texts,
    }
    return templates.environment("cetane.lab", filters)


def line(text: str) -> str:
    """A text as one line."""
    return " ".join(text.split())


def in_cell(text: str) -> str:
    """A text for a cell of a table: a bar would begin the next one."""
    return line(text).replace("|", "&#124;")


def quoted(text: str) -> str:
    """An answer for a place between backticks, in a table or outside."""
    return text.translate(MARKS)[:300]


def short(value: float | None) -> str:
    """A number with four significant digits; a dash for None."""
    return "-" if value is None else f"{value:.4g}"


def texts(reported: Iterable[ArmTexts], arm: ArmName) -> list[tuple[str, str]]:
    """An arm's texts, by name; of many answers only the first."""
    mine = [(text.name, text.lines[arm]) for text in reported if arm in text.lines]
    answers = [name for name, _ in mine if name.startswith("smoke ")]
    return [(name, text) for name, text in mine if name not in answers[ANSWERS:]]


def change_texts(tables: dict[str, object], inside: str = "") -> Iterator[str]:
    """The changes of a recipe, one by one, nearly in TOML's form; `inside` a table."""
    for key, value in tables.items():
        if isinstance(value, dict):
            yield from change_texts(value, f"{inside}{key}.")
        else:
            yield f"{inside}{key} = {shown(value)}"


def extras(arm: Arm) -> Iterator[str]:
    """The settings of an arm beside its recipe and its changes, in words."""
    if arm.subset is not None:
        yield f"a head of {arm.subset} tokens"
    if arm.drafter:
        yield f"drafts by {arm.drafter}"
    if arm.sparse is not None:
        yield f"{arm.sparse.budget} keys by {arm.sparse.keys}"
    if arm.activations:
        yield f"8-bit activations, calibration {arm.activations}"


def shown(value: object) -> str:
    """A value, nearly in TOML's form; of a long list only its length."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list) and len(value) > LONG:
        return f"[{len(value)} values]"
    return str(value).replace("'", '"')


def cell(figure: Figure | None) -> str:
    """A figure with its unit and its spread."""
    if figure is None:
        return ""
    if figure.value is None:
        return "none"
    text, unit = number(figure.value, figure.unit)
    if figure.low is None or figure.high is None:
        return f"{text} {unit}".strip()
    low, high = number(figure.low, figure.unit)[0], number(figure.high, figure.unit)[0]
    return f"{text} ({low} to {high}) {unit}".strip()


def number(value: float, unit: str) -> tuple[str, str]:
    """A value and its unit for readers: bytes in megabytes, shares without a unit."""
    if unit == "B":
        return f"{value / 1e6:.4g}", "MB"
    return f"{value:.5g}", "" if unit == "share" else unit
