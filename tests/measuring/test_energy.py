"""Joules per token from meters' files in their published forms, checked by hand."""

import json
import plistlib
from datetime import UTC, datetime
from typing import Any

import pytest

from cetane.measuring.energy import BadSamples, joules, read_samples

START = datetime(2026, 11, 22, 12, 0, 0, tzinfo=UTC)
T0 = START.timestamp()


def plist(second: int, **processor: Any) -> bytes:
    """One sample of `powermetrics -f plist`, of the second that ends at `second`."""
    when = datetime.fromtimestamp(T0 + second, UTC).replace(tzinfo=None)
    content = {
        "is_delta": True, "elapsed_ns": 1_000_000_000, "hw_model": "Mac16,5", "timestamp": when,
        "kern_osversion": "25B78", "thermal_pressure": "Nominal", "processor": processor,
    }  # fmt: skip
    return plistlib.dumps(content)


def powermetrics(*samples: bytes) -> bytes:
    return b"\0".join(samples)


def test_a_plist_of_powermetrics_by_hand() -> None:
    """Ten seconds of 1,500 mJ on the CPU, 200 on the GPU, 3,300 on the Neural Engine; 250 tokens.

    5 W for 10 s are 50 J, and over 250 tokens 0.2 J each: 0.06, 0.008 and 0.132.
    """
    each = {"cpu_energy": 1500, "gpu_energy": 200, "ane_energy": 3300, "combined_power": 5000.0}
    samples = read_samples(powermetrics(*[plist(s, **each) for s in range(1, 11)]))
    made = joules(samples, T0, T0 + 10, 250)
    assert made is not None
    per_token = made["joules_per_token"]
    assert per_token["processor"] == pytest.approx(0.2)
    assert per_token["cpu"] == pytest.approx(0.06)
    assert per_token["gpu"] == pytest.approx(0.008)
    assert per_token["ane"] == pytest.approx(0.132)
    assert made["samples"] == 8  # the first two seconds are the counters' lag
    assert not made["ane_silent"] and any("estimate" in text for text in made["caveats"])


def test_powers_stand_in_where_there_are_no_energies() -> None:
    samples = read_samples(plist(1, cpu_power=1500.0, gpu_power=0.0, ane_power=2500.0))
    assert samples[0].watts == {"cpu": 1.5, "gpu": 0.0, "ane": 2.5}


def test_without_the_neural_engines_channel_it_is_silent() -> None:
    """macOS 26 leaves it out without --show-all."""
    samples = read_samples(powermetrics(*[plist(s, cpu_energy=1000) for s in range(1, 6)]))
    made = joules(samples, T0, T0 + 5, 10)
    assert made is not None and made["ane_silent"] and "ane" not in made["watts"]


MACMON = {
    "timestamp": "2026-11-22T12:00:01.500000+00:00", "temp": {"cpu_temp_avg": 43.7},
    "memory": {"ram_total": 25769803776}, "ecpu_usage": [1181, 0.08], "cpu_power": 0.5,
    "gpu_power": 0.25, "ane_power": 1.25, "all_power": 2.0, "sys_power": 6.0, "ram_power": 0.125,
    "gpu_ram_power": 0.001,
}  # fmt: skip


def macmon(count: int, **others: Any) -> bytes:
    """Lines of `macmon pipe -i 500`, two a second."""
    lines = []
    for sample in range(1, count + 1):
        when = datetime.fromtimestamp(T0 + sample / 2, UTC).isoformat()
        lines.append(json.dumps(MACMON | {"timestamp": when} | others))
    return ("\n".join(lines) + "\n").encode()


def test_a_stream_of_macmon_by_hand() -> None:
    """2 W of the processor for 10 s are 20 J; over 100 tokens 0.2 J. The whole Mac's 6 W: 0.6 J."""
    made = joules(read_samples(macmon(20), 0.5), T0, T0 + 10, 100)
    assert made is not None
    assert made["joules_per_token"] == pytest.approx(
        {"processor": 0.2, "cpu": 0.05, "gpu": 0.025, "ane": 0.125, "ram": 0.0125, "sys": 0.6}
    )
    assert made["samples"] == 16


def test_macmons_first_sample_is_as_long_as_its_second() -> None:
    """Nobody says at what interval it ran. Of 20 halves of a second, the load begins at T0."""
    samples = read_samples(macmon(20))
    assert [sample.seconds for sample in samples] == pytest.approx([0.5] * 20)
    assert samples[0].end - samples[0].seconds == pytest.approx(T0)


def test_only_what_lies_inside_the_load_counts() -> None:
    """Idle before and after: 1 W; the load in the middle 11 W."""
    watts = [1.0] * 4 + [11.0] * 10 + [1.0] * 4
    samples = read_samples(
        powermetrics(*[plist(s, cpu_energy=1e3 * w) for s, w in enumerate(watts, 1)])
    )
    made = joules(samples, T0 + 4, T0 + 14, 50)
    assert made is not None and made["samples"] == 8
    assert made["joules_per_token"]["cpu"] == pytest.approx(11 * 10 / 50)


def test_no_sample_inside_gives_nothing() -> None:
    assert joules(read_samples(macmon(4), 0.5), T0 + 100, T0 + 200, 5) is None


def test_a_last_sample_that_was_cut_off_is_left_out() -> None:
    whole = powermetrics(plist(1, cpu_energy=5), plist(2, cpu_energy=5))
    assert len(read_samples(whole[:-100])) == 1
    assert len(read_samples(macmon(3)[:-40])) == 2


BOMB = b"""<?xml version="1.0"?><!DOCTYPE plist [<!ENTITY a "aaaaaaaa"><!ENTITY b "&a;&a;">]>
<plist version="1.0"><string>&b;</string></plist>"""


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no sample"),
        (b"hello", "not a sample of macmon"),
        (b"[" * 100_000, "not a sample of macmon"),
        (BOMB, "entities"),
        (b"<?xml version='1.0'?><plist><dict>", "not a plist"),
        (plistlib.dumps({"elapsed_ns": 10}), "no 'processor'"),
        (macmon(1, cpu_power=10**400), "is inf"),
        (plist(1, gpu_power=True), "not a number"),
        (plist(1, ane_power=-1.0), "-1.0"),
        (plist(1, cpu_energy=float("nan")), "nan"),
        (plist(1, cpu_energy=5e6), "beyond any Mac"),
        (plist(1), "no power"),
        (macmon(2, ane_power=1e9), "beyond any Mac"),
        (macmon(1) + macmon(1), "0 s after"),
        (macmon(1, timestamp="yesterday"), "not a sample"),
        (macmon(1, cpu_power="much"), "not a number"),
        (
            powermetrics(plist(1, cpu_power=1.0), plist(3, cpu_power=1.0), plist(2, cpu_power=1.0)),
            "sample 3 is older",
        ),
    ],
)
def test_other_files_are_refused(content: bytes, reason: str) -> None:
    with pytest.raises(BadSamples, match=reason):
        read_samples(content)


def test_the_published_samples_of_macmon_are_read() -> None:
    """The example in its readme, with the comments taken out."""
    line = json.dumps(
        MACMON | {"cpu_power": 0.20486385, "gpu_power": 0.017451683, "ane_power": 0.0}
    )
    (sample,) = read_samples(line.encode(), 1.0)
    assert sample.watts["cpu"] == 0.20486385 and sample.watts["ane"] == 0.0
