"""The files that a user gives beside the bundle: a sweep's points, and a benchmark's JSON."""

import math
import sys
from pathlib import Path
from typing import Any

from cetane.errors import CetaneError
from cetane.files import read_bytes
from cetane.report.content.speed import DraftBench, Drafted, JudgedBy
from cetane.report.content.sweep import SweepAnswer, SweepPoint, SweepQuality
from cetane.speculate.bench import Speed
from cetane.sweeps.points import Point, pareto, read_points
from cetane.validation import MOST_DRAWN, Data, parse_json, validated

LARGEST = 1 << 25
"""The largest file that is read, in bytes. A thousand points have a few megabytes."""
SHOWN = {"bits_per_weight": MOST_DRAWN, "kl": MOST_DRAWN, "perplexity_ratio": sys.float_info.max}
"""The largest figures of a sweep's point. Only the ratio, a power of e, is not drawn."""
LARGEST_RATIO = 100
"""The largest ratio that is drawn. No draft makes decoding a hundred times faster."""


class Benchmark(Data):
    """The output of `cetane bench --json`."""

    bundle: str
    draft_tokens: int
    seconds: dict[int, float]
    """Seconds of a call, by its number of tokens."""
    passed: bool
    judged_by: JudgedBy
    speeds: tuple[Speed, ...]


def read_benchmark(path: Path, bundle: Path) -> DraftBench:
    """A benchmark's figures. Raises CetaneError if the file holds none."""
    hint = "cetane bench BUNDLE --json writes one"
    content = parse_json(read_bytes(path, LARGEST), str(path), hint)
    benchmark = validated(Benchmark, content, f"{path}: not a benchmark", hint)
    rows = tuple(
        drafted(speed)
        for speed in benchmark.speeds
        if None not in (speed.plain, speed.speculative, speed.ratio)
    )
    if not rows:
        raise CetaneError(f"{path}: the benchmark has no figures", hint)
    if not all(0 <= row.ratio <= LARGEST_RATIO for row in rows):
        raise CetaneError(f"{path}: a ratio is not between 0 and {LARGEST_RATIO}", hint)
    longest = max(2.0, math.ceil(max(row.ratio for row in rows) * 2) / 2)
    return DraftBench(
        bundle=benchmark.bundle,
        draft_tokens=benchmark.draft_tokens,
        ours=same_place(benchmark.bundle, bundle),
        passed=benchmark.passed,
        judged_by=benchmark.judged_by,
        calls={tokens: 1000 * seconds for tokens, seconds in benchmark.seconds.items()},
        longest=longest,
        ticks=tuple(i / 2 for i in range(1, math.floor(longest * 2))),
        drafters=tuple(dict.fromkeys(row.drafter for row in rows)),
        rows=rows,
    )


def same_place(name: str, folder: Path) -> bool:
    """Whether a name, which may be no path at all, is that of a folder."""
    try:
        return Path(name).resolve() == folder.resolve()
    except (OSError, ValueError):
        return False


def drafted(speed: Speed) -> Drafted:
    return Drafted(**{name: getattr(speed, name) for name in Drafted.model_fields})


def read_sweep(path: Path, fingerprint: str) -> SweepQuality:
    """The points of a sweep's folder or file.

    A folder may hold several models and texts. This takes the points of this checkpoint, if there
    are any, and of these the points of the last text.
    """
    file = path / "sweep.jsonl" if path.is_dir() else path
    if file.is_file() and file.stat().st_size > LARGEST:
        raise CetaneError(
            f"{file}: too large for a sweep, which has at most {LARGEST >> 20} MiB",
            "name the sweep.jsonl of one sweep",
        )
    points = read_points(file)
    if not points:
        raise CetaneError(f"{file}: no points", "cetane sweep MODEL -o FOLDER makes them")
    for point in points:
        for name, most in SHOWN.items():
            if not abs(value := getattr(point, name)) <= most:
                where = f"{file}: {point.name}: {name}"
                raise CetaneError(f"{where} is {value:g}, not within ±{most:g}")
    mine = [p for p in points if p.model.fingerprint == fingerprint] or points
    last = mine[-1]
    alike = [p for p in mine if comparison_key(p) == comparison_key(last)]
    alike = sorted(alike, key=lambda p: (-p.bits_per_weight, p.kl))
    front = {point.key for point in pareto(alike)}
    return SweepQuality(
        model=last.model.source,
        text=last.text.name,
        tokens=last.text.tokens,
        points=tuple(quality_point(p, p.key in front) for p in alike),
    )


def comparison_key(point: Point) -> tuple[Any, ...]:
    """The key that points must share to be compared."""
    return point.model.fingerprint, point.model.content, point.text.sha256, point.text.tokens


def quality_point(point: Point, best: bool) -> SweepPoint:
    return SweepPoint(
        name=point.name,
        method=point.method,
        bits=point.bits_per_weight,
        bytes=point.weight_bytes,
        perplexity=point.perplexity,
        ratio=point.perplexity_ratio,
        kl=point.kl,
        top1=point.top1,
        cosine=min(point.cosines.values(), default=None),
        target=str(point.predicted.target),
        tok_s=point.predicted.tok_s,
        off_ane=point.predicted.weights_off_ane,
        best=best,
        smoke=tuple(
            SweepAnswer(id=answer.id, text=answer.text, expected=answer.expected)
            for answer in point.smoke
        ),
    )
