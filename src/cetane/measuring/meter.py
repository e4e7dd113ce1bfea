"""A power meter that runs beside a load: macmon, powermetrics, or a file that grows."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import IO

from .energy import BadSamples, Sample, read_samples

INTERVAL_MS = 500
"""Milliseconds of a sample."""
MACMON = ("macmon", "pipe", "-i", str(INTERVAL_MS))
POWERMETRICS = (
    "powermetrics", "--samplers", "cpu_power,gpu_power,ane_power,thermal", "-i", str(INTERVAL_MS),
    "-f", "plist", "--show-all",
)  # fmt: skip
"""`--show-all`: macOS 26 leaves the Neural Engine out without it."""


def command() -> list[str] | None:
    """The command of a meter that can run here without a password; None if there is none."""
    if shutil.which("powermetrics") and os.geteuid() == 0:
        return list(POWERMETRICS)
    return list(MACMON) if shutil.which("macmon") else None


class Meter:
    """A context in which power is recorded, each time anew. `samples` gives the samples,
    afterwards too."""

    def __init__(self, growing: Path | None = None) -> None:
        """`growing`: a file that a meter already writes, in place of one that is started."""
        self.growing = growing
        self.command = None if growing else command()
        self.output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str | None:
        """The meter's name; None if there is no meter."""
        return str(self.growing) if self.growing else self.command[0] if self.command else None

    def __enter__(self) -> Meter:
        if self.command:
            self.output.seek(0)  # a sample that was cut off must not stay in the middle
            self.output.truncate()
            self.process = subprocess.Popen(
                self.command, stdout=self.output, stderr=subprocess.DEVNULL
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def samples(self) -> list[Sample]:
        """The samples of the last context so far, or those in `growing`. Raises BadSamples if the
        meter wrote none."""
        try:
            if self.growing:
                return read_samples(self.growing.read_bytes())
            self.output.seek(0)
            return read_samples(self.output.read(), INTERVAL_MS / 1e3)
        except OSError as error:
            raise BadSamples(str(error)) from None
