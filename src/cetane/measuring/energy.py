"""Energy: power meters' samples, and the joules of a stretch of time.

Two meters are read: `powermetrics` (root; one plist a sample, separated by NUL bytes; energies in
mJ) and `macmon pipe` (no root; one JSON object a line; powers in W).
"""

from __future__ import annotations

import json
import math
import plistlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any

from . import Json

RAILS = ("cpu", "gpu", "ane")
LAG = 2.0
"""Seconds at the start of a load that are left out: the power counters lag by so much."""
MOST_WATTS = 1000.0
"""A larger power of any rail is refused: no Mac draws it."""
MOST_SAMPLES = 1_000_000
"""Further samples of a file are not read."""
CAVEATS = (
    "Power is an estimate of the system's, not to be compared across devices (powermetrics' help).",
    "Some systems report 0 mW for the Neural Engine while it works; macOS 26 and 27 changed its "
    "channels.",
    "The first 2 s of a load are left out, since the counters lag. Idle power is not subtracted.",
    "Other programs on the machine count too.",
)


class BadSamples(ValueError):
    """A file that is not of a power meter, or has figures beyond reason."""


@dataclass(frozen=True)
class Sample:
    """Mean watts by rail, over `seconds` that end at `end` (Unix time)."""

    end: float
    seconds: float
    watts: dict[str, float]


def read_samples(content: bytes, interval: float = 1.0) -> list[Sample]:
    """The samples of either meter. `interval`: the seconds of a single sample of macmon.

    Raises BadSamples for any other file.
    """
    plists = content.lstrip().startswith((b"<?xml", b"<plist", b"bplist"))
    samples = list(powermetrics(content) if plists else macmon(content, interval))
    if not samples:
        raise BadSamples("no sample of powermetrics or macmon")
    if not plists and len(samples) > 1:  # macmon tells only when a sample ended
        samples[0] = replace(samples[0], seconds=samples[1].seconds)
    return samples


def powermetrics(content: bytes) -> Iterator[Sample]:
    """The samples of `powermetrics -f plist`. A last one that was cut off is left out."""
    documents = [part for part in content.split(b"\0") if part.strip()]
    before = -math.inf
    for number, part in enumerate(documents[:MOST_SAMPLES], 1):
        if b"<!ENTITY" in part:
            raise BadSamples(f"sample {number}: a plist of powermetrics has no entities")
        try:
            values = plistlib.loads(part.strip(), fmt=plistlib.FMT_XML)
        except Exception as error:  # the parser of XML raises several kinds
            if number == len(documents) and number > 1:
                return
            raise BadSamples(f"sample {number} is not a plist: {error}") from None
        sample = plist_sample(values, number)
        if sample.end < before:  # of whole seconds, so several samples may share one
            raise BadSamples(f"sample {number} is older than the one before: give one recording")
        before = sample.end
        yield sample


def plist_sample(values: Any, number: int) -> Sample:
    """One sample: energies in mJ, or powers in mW, of `processor`."""
    where = f"sample {number}"
    if not isinstance(values, dict) or not isinstance(values.get("processor"), dict):
        raise BadSamples(f"{where} has no 'processor': record it with -s cpu_power,ane_power")
    seconds = figure(values.get("elapsed_ns"), f"{where}: elapsed_ns") / 1e9
    time = values.get("timestamp")
    if not isinstance(time, datetime) or not seconds > 0:
        raise BadSamples(f"{where} has no timestamp, or no time in it")
    end = time.replace(tzinfo=timezone.utc).timestamp()  # noqa: UP017
    processor, watts = values["processor"], {}
    for rail in RAILS:
        if f"{rail}_energy" in processor:
            spent = figure(processor[f"{rail}_energy"], f"{where}: {rail}_energy")
            watts[rail] = spent / 1e3 / seconds
        elif f"{rail}_power" in processor:
            watts[rail] = figure(processor[f"{rail}_power"], f"{where}: {rail}_power") / 1e3
    return checked(Sample(end, seconds, watts), where)


def macmon(content: bytes, interval: float) -> Iterator[Sample]:
    """The samples of `macmon pipe`. A last line that was cut off is left out."""
    lines = [line for line in content.splitlines() if line.strip()]
    before: float | None = None
    for number, line in enumerate(lines[:MOST_SAMPLES], 1):
        where = f"line {number}"
        try:
            values = json.loads(line)
            end = datetime.fromisoformat(values["timestamp"]).timestamp()
        except (ValueError, KeyError, TypeError, RecursionError):
            if number == len(lines) and number > 1:
                return
            raise BadSamples(f"{where} is not a sample of macmon") from None
        seconds = interval if before is None else end - before
        if not 0 < seconds < 3600:
            raise BadSamples(f"{where}: {seconds:g} s after the sample before")
        before = end
        watts = {
            rail: figure(values[f"{rail}_power"], f"{where}: {rail}_power")
            for rail in (*RAILS, "ram", "sys")
            if f"{rail}_power" in values
        }
        yield checked(Sample(end, seconds, watts), where)


def figure(value: Any, where: str) -> float:
    """A finite number that is not negative."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadSamples(f"{where} is not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not (math.isfinite(number) and number >= 0):
        raise BadSamples(f"{where} is {number}")
    return number


def checked(sample: Sample, where: str) -> Sample:
    if not sample.watts:
        raise BadSamples(f"{where} has no power of a processor")
    for rail, watts in sample.watts.items():
        if watts > MOST_WATTS:
            raise BadSamples(f"{where}: {watts:.3g} W of {rail} is beyond any Mac")
    return sample


def with_processor(watts: dict[str, float]) -> dict[str, float]:
    """Watts by rail, with those of the processor: the sum of its rails."""
    return {**watts, "processor": sum(watts.get(rail, 0.0) for rail in RAILS)}


def joules(samples: list[Sample], begun: float, ended: float, tokens: int) -> Json | None:
    """The energy of a load from `begun` to `ended` (Unix time) that gave `tokens` tokens.

    The mean power of the samples inside it, without its first `LAG` seconds, times its duration.
    None if no sample lies inside.
    """
    inside = [s for s in samples if s.end - s.seconds >= begun + LAG and s.end <= ended]
    covered = sum(s.seconds for s in inside)
    if not inside or tokens < 1:
        return None
    rails = sorted(set.intersection(*(set(s.watts) for s in inside)))
    watts = {rail: sum(s.watts[rail] * s.seconds for s in inside) / covered for rail in rails}
    return {
        "begun": begun,
        "ended": ended,
        "tokens": tokens,
        "samples": len(inside),
        "watts": watts,
        "joules_per_token": {
            rail: w * (ended - begun) / tokens for rail, w in with_processor(watts).items()
        },
        "ane_silent": watts.get("ane", 0.0) == 0.0,
        "caveats": list(CAVEATS),
    }
