"""The self-contained page of some content. The template only formats the content.

Every figure is written as `<data value=...>` with the content's own value. jinja escapes all text
from bundles and journals, since their names and answers may be hostile.
"""

import math
from collections.abc import Sequence
from functools import cache
from itertools import groupby
from operator import attrgetter
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from cetane import templates
from cetane.lab.entry import ExperimentReport
from cetane.report import plots
from cetane.report.content.page import BundleReport
from cetane.report.content.placement import Cell

LEVELS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
"""The borders of the colour steps for 1 - cosine. fp16 alone errs by some 1e-6."""


def page(content: BundleReport | ExperimentReport) -> str:
    """The page of a bundle or an experiment."""
    template = environment().get_template(f"{content.kind}.html.j2")
    return template.render(content=content, plots=plots)


@cache
def environment() -> Environment:
    """The templates, with their filters."""
    filters = {
        "number": number,
        "integer": integer,
        "percent": percent,
        "size": size,
        "level": level,
        "width": width,
        "decades": decades,
        "mixed": mixed,
        "plain": plain,
        "shape": shape,
        "groups": groups,
    }
    return templates.environment("cetane.report", filters, autoescape=True)


def data(value: float, text: str) -> Markup:
    """A figure: the text to read, and the content's own value."""
    return Markup('<data value="{}">{}</data>').format(repr(value), text)


def plain(value: float, digits: int = 4) -> str:
    """A number with `digits` significant digits, without the markup of a figure; a dash for NaN and
    infinity."""
    if not math.isfinite(value):
        return "–"
    if value == int(value) and abs(value) < 1e7:
        return f"{int(value):,}"
    text = f"{value:.{digits}g}"
    return f"{float(text):,.0f}" if "e+" in text else text


def number(value: float | None, digits: int = 4) -> Markup:
    """A figure with `digits` significant digits; a dash for None, NaN and infinity."""
    if value is None or not math.isfinite(value):
        return Markup("–")
    return data(value, plain(value, digits))


def integer(value: int) -> Markup:
    return data(value, f"{value:,}")


def percent(value: float | None, digits: int = 0) -> Markup:
    """A share as a percentage."""
    text = "–" if value is None else f"{100 * value:.{digits if value else 0}f}\N{NO-BREAK SPACE}%"
    return Markup(text) if value is None else data(value, text)


def size(value: float | None) -> Markup:
    """Bytes, in a suitable unit."""
    if value is None:
        return Markup("–")
    for unit, bytes_ in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= 0.9995 * bytes_:  # which three digits round to 1
            return data(value, f"{value / bytes_:.3g}\N{NO-BREAK SPACE}{unit}")
    return data(value, f"{value}\N{NO-BREAK SPACE}B")


def level(cosine: float) -> int:
    """The colour step of a cosine's distance from 1."""
    return sum(not 1 - cosine < border for border in LEVELS)  # NaN is the worst


def width(value: float, end: float) -> str:
    """A length on an axis from zero to `end`, in CSS."""
    return f"{100 * min(max(value / end, 0), 1):.2f}%" if end > 0 else "0%"


def decades(value: float, end: float, start: float = 1.0) -> str:
    """A length on a logarithmic axis from `start` to `end`, in CSS."""
    share = math.log(max(value, start) / start) / math.log(end / start)
    return f"{100 * min(share, 1):.2f}%"


def mixed(cell: Cell) -> str:
    """The background of a cell whose ops run in several places: stripes by their numbers."""
    total, stops, done = sum(cell.placed.values()), [], 0
    for place, count in reversed(cell.placed.items()):
        start, done = done, done + count
        colour = f"var(--{place.lower()})"
        stops.append(f"{colour} {100 * start / total:.0f}% {100 * done / total:.0f}%")
    return f"background:linear-gradient(to top,{','.join(stops)})"


def shape(lengths: Sequence[int]) -> Markup:
    """A tensor's shape."""
    return Markup(" × ").join(data(length, str(length)) for length in lengths)


def groups(rows: Sequence[Any], key: str) -> list[tuple[str, list[Any]]]:
    """Groups of neighbours with the same attribute; jinja's own filter would sort them."""
    return [(name, list(group)) for name, group in groupby(rows, attrgetter(key))]
