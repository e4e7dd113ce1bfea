"""Tables on a terminal: nothing is cut, whatever its width."""

import io
from collections.abc import Iterator

import pytest
from rich.console import Console

from cetane.cli import output

COLUMNS = ["drafter", "plain", "call", "drafted calls", "accepted", "by calls", "verdict"]
ROW = ["union", 12.25, 3.5, 48, 0.91, 1.021, "pays"]


@pytest.fixture(params=range(40, 100, 3))
def written(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[io.StringIO]:
    file = io.StringIO()
    monkeypatch.setattr(output, "console", Console(file=file, width=request.param))
    yield file


def test_every_cell_is_whole(written: io.StringIO) -> None:
    output.table("what it gained", COLUMNS, [ROW, ROW])
    text = written.getvalue()
    for cell in ROW:
        assert text.count(str(cell)) >= 2, text
    assert max(map(len, text.splitlines())) <= output.console.width
