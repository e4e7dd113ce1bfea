"""The plot of a sweep: perplexity against size for every method, and the Pareto front."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cetane.errors import shortened
from cetane.files import disk_errors, replacing
from cetane.sweeps.points import Point, PointMethod, pareto

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLES: dict[PointMethod, tuple[str, str, str]] = {
    "kmeans": ("#1f6feb", "o", "k-means palettes"),
    "weighted": ("#1a7f37", "D", "weighted k-means"),
    "uniform": ("#bf8700", "s", "uniform palettes"),
    "linear": ("#8250df", "^", "linear"),
    "mixed": ("#cf222e", "*", "mixed by layer"),
    "gptq": ("#0a7b83", "P", "second order (GPTQ)"),
    "vector": ("#6e7781", "v", "palettes of vectors"),
    "tuned": ("#bc4c9b", "X", "tuned"),
}
"""Colour, marker and name. Markers differ too, for readers who are colour-blind."""
INK, FAINT = "#24292f", "#d0d7de"
LONGEST = 40
"""The most characters of a name in the plot, so that it has room for the axes."""
LINES: dict[PointMethod, str] = {"linear": "block32", "gptq": "8", "tuned": "8"}
"""The groups whose points are joined by lines, for each method; else groups of 32."""
SETTINGS = {
    "font.size": 10, "axes.edgecolor": FAINT, "axes.labelcolor": INK, "text.color": INK,
    "xtick.color": INK, "ytick.color": INK, "axes.spines.top": False, "axes.spines.right": False,
    "svg.fonttype": "none", "svg.hashsalt": "cetane",
}  # fmt: skip


def plot(points: Sequence[Point], chosen: Point | None, folder: Path) -> list[Path]:
    """Write `sweep.svg` and `sweep.png` into a folder; returns their paths."""
    import matplotlib as mpl  # here because it takes a second to load
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context(SETTINGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph ")  # the font lacks a letter of a name
        figure = Figure(figsize=(8.4, 5.2), layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure.add_subplot(), points, chosen)
        paths = [folder / f"sweep.{kind}" for kind in ("svg", "png")]
        for path in paths:
            metadata = {"Date": None} if path.suffix == ".svg" else None
            with disk_errors(path), replacing(path) as temporary:
                figure.savefig(temporary, format=path.suffix[1:], dpi=160, metadata=metadata)
    return paths


def draw(axes: Axes, points: Sequence[Point], chosen: Point | None) -> None:
    """Draw perplexity over bits per weight. Lower is better, and so is further left."""
    compressed = [point for point in points if point.method != "fp16"]
    front = [point for point in pareto(points) if point.method != "fp16"]
    axes.plot(
        *bits_and_perplexity(front), color=INK, linewidth=6, alpha=0.10, solid_capstyle="round",
        solid_joinstyle="round", label="Pareto front", zorder=1,
    )  # fmt: skip
    for method, (color, marker, name) in STYLES.items():
        mine = [point for point in compressed if point.method == method]
        line = sorted(
            (p for p in mine if p.group == LINES.get(method, "32")), key=lambda p: p.bits_per_weight
        )
        if len(line) > 1:
            axes.plot(*bits_and_perplexity(line), color=color, linewidth=1.4, alpha=0.8, zorder=2)
        if mine:
            size = 150 if method == "mixed" else 42
            axes.scatter(
                *bits_and_perplexity(mine), s=size, color=color, marker=marker, label=name,
                edgecolors="white", linewidths=0.8, zorder=3,
            )  # fmt: skip
    whole = [point for point in points if point.method == "fp16"]
    for point in whole:
        axes.axhline(point.perplexity, color=INK, linewidth=1, linestyle=(0, (4, 3)), alpha=0.6)
        axes.annotate(
            f"fp16: {point.perplexity:.2f}", (1, point.perplexity), textcoords="offset points",
            xycoords=axes.get_yaxis_transform(), xytext=(-4, 4), ha="right", fontsize=9,
        )  # fmt: skip
    if chosen is not None:
        right = chosen.bits_per_weight > sum(axes.get_xlim()) / 2
        axes.annotate(
            f"chosen: {shortened(chosen.name, LONGEST)}\n{chosen.weight_bytes / 1e6:.1f} MB, "
            f"perplexity {chosen.perplexity:.2f}",
            (chosen.bits_per_weight, chosen.perplexity), textcoords="offset points",
            xytext=(-16 if right else 16, 34), ha="right" if right else "left", fontsize=9,
            arrowprops={"arrowstyle": "-", "color": INK, "linewidth": 0.8}, parse_math=False,
        )  # fmt: skip
    decorate(axes, points)


def decorate(axes: Axes, points: Sequence[Point]) -> None:
    """Set the scales, ticks, labels, title and legend."""
    from matplotlib.ticker import MaxNLocator, NullLocator

    first = points[0]
    axes.set_yscale("log")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_locator(MaxNLocator(20, steps=[1, 2, 5, 10], integer=True))
    perplexities = [point.perplexity for point in points]
    ticks = nice(min(perplexities), max(perplexities))
    axes.set_yticks(ticks, [f"{tick:,g}" for tick in ticks])
    axes.grid(axis="y", color=FAINT, linewidth=0.7, alpha=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.set_xlabel("bits per weight, scales and palettes counted")
    axes.set_ylabel("perplexity (log scale), lower is better")
    axes.set_title(
        f"{shortened(Path(first.model.source).name, LONGEST)}: {first.text.tokens} tokens of "
        f"{shortened(first.text.name, LONGEST)}",
        loc="left", fontsize=11, fontweight="bold", parse_math=False,
    )  # fmt: skip
    axes.legend(frameon=False, loc="upper right")


def bits_and_perplexity(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [point.bits_per_weight for point in points], [point.perplexity for point in points]


def nice(low: float, high: float) -> list[Any]:
    """Ticks of a log axis: 1, 2 and 5 times powers of ten, or more if these are too few."""
    for steps in ((1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7), tuple(x / 20 for x in range(20, 200))):
        ticks = [s * 10.0**p for p in range(-1, 10) for s in steps if low <= s * 10.0**p <= high]
        if len(ticks) >= 4:
            break
    return ticks[:: max(1, len(ticks) // 10)]
