"""A meter's samples, load after load."""

from pathlib import Path

import pytest
from tests.measuring.test_energy import macmon, plist, powermetrics

from cetane.measuring.meter import Meter

CONTENTS = {
    "powermetrics": powermetrics(plist(1, cpu_energy=5), plist(2, cpu_energy=5)),
    "macmon": macmon(2),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_a_sample_that_was_cut_off_spares_the_next_load(name: str, tmp_path: Path) -> None:
    file, content, meter = tmp_path / "samples", CONTENTS[name], Meter()
    meter.command = ["cat", str(file)]
    for written, count in ((content[:-40], 1), (content, 2)):
        file.write_bytes(written)
        with meter:
            assert meter.process is not None
            meter.process.wait()
        assert len(meter.samples()) == count
