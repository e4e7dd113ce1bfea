"""Plots as inline SVG. Text stays text. Colours are the page's variables, so a plot turns dark with
the page. The same content gives the same bytes."""

import io
import math
import re
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from cetane.errors import steerless
from cetane.report.content.sweep import SweepPoint, SweepQuality

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "#000001": "var(--ink)",
    "#000002": "var(--soft)",
    "#000003": "var(--line)",
    **{f"#{4 + i:06d}": f"var(--s{i})" for i in range(8)},
}
"""The page's variables, by the colours that matplotlib draws with."""
INK, SOFT, LINE, *SERIES = COLOURS
MARKERS = "osD^vPXd"
METHODS = ("gptq", "linear", "uniform", "kmeans", "weighted", "mixed", "tuned", "vector")
ARMS = {"baseline": SOFT, "candidate": SERIES[0]}
"""Lines in the colours of an experiment's bars."""
WIDTH, HEIGHT = 5.2, 3.9
"""A plot's size in inches of 72 points. On a phone, its text is as large as that of the page."""


def quality(sweep: SweepQuality) -> Markup:
    """KL of every format against its bits per weight, with the line of unbeaten formats."""
    figure, axes = blank()
    drawn = [p for p in sweep.points if p.kl > 0]  # fp16 has no place on a logarithmic axis
    front = sorted((p for p in drawn if p.best), key=lambda p: p.bits)
    axes.plot([p.bits for p in front], [p.kl for p in front], color=SOFT, lw=1, zorder=1)
    for index, method in enumerate(METHODS):
        mine = [p for p in drawn if p.method == method]
        if mine:
            axes.scatter(
                [p.bits for p in mine], [p.kl for p in mine], s=34, marker=MARKERS[index],
                color=SERIES[index], label=method, zorder=2, linewidths=0,
            )  # fmt: skip
    axes.set_yscale("log")
    axes.margins(x=0.2)
    axes.set_xlabel("bits per weight, scales and palettes counted")
    axes.set_ylabel("KL to the fp16 weights, nats")
    labelled = front[:: max(1, math.ceil(len(front) / 5))]
    for point in labelled:
        side, shift = ("left", 5) if point.bits < 3 else ("right", -5)  # away from the axis
        axes.annotate(short(point), (point.bits, point.kl), xytext=(shift, -4), ha=side,
                      va="top", textcoords="offset points", fontsize=9, color=INK,
                      parse_math=False)  # fmt: skip
    axes.legend(frameon=False, labelcolor=INK, fontsize=10, handletextpad=0.2)
    return svg(figure, "quality", f"KL against bits per weight of {len(drawn)} formats")


def short(point: SweepPoint) -> str:
    return point.name.replace("-kmeans", "").replace("-group", "/").replace("palette", "p")


def curves(name: str, lines: dict[str, Sequence[tuple[float, float]]], y: str) -> Markup:
    """Lines of `(x, y)`, each labelled at its end."""
    figure, axes = blank()
    for index, (label, points) in enumerate(lines.items()):
        xs, ys = [x for x, _ in points], [v for _, v in points]
        colour = ARMS.get(label, SERIES[index % len(SERIES)])
        axes.plot(xs, ys, color=colour, lw=1.8, marker=MARKERS[index % 6], ms=4)
        if points:
            axes.annotate(
                label, (xs[-1], ys[-1]), xytext=(6, 0), textcoords="offset points",
                color=colour, fontsize=10, va="center", annotation_clip=False, parse_math=False,
            )  # fmt: skip
    axes.set_ylabel(y, parse_math=False)
    return svg(figure, name, f"{y}: {', '.join(lines)}")


def blank() -> "tuple[Figure, Axes]":
    """Axes without a box: two spines, a faint grid, text in the page's colours."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.fonttype"] = "none"
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(SOFT)
    axes.grid(color=LINE, lw=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=SOFT, labelsize=10, length=3)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set_color(SOFT)
        axis.label.set_fontsize(10.5)
    return figure, axes


def svg(figure: Any, name: str, label: str) -> Markup:
    """A figure as an element of the page; `name` makes its ids unique."""
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # text stays text, in the reader's own font
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = steerless(file.getvalue())
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(href="#|url\(#)', rf"\1{name}-", text)
    text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1; font-family: inherit", text)
    for colour, variable in COLOURS.items():
        text = text.replace(colour, variable)
    text = re.sub(r'(<svg [^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg [^>]*?) height="[^"]*"', r"\1", text, count=1)
    head = Markup('<svg role="img" aria-label="{}"').format(steerless(label))
    return Markup(text.replace("<svg", head, 1))
