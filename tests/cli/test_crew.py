"""What a command says of its workers."""

import io
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from rich.console import Console

from cetane.cli import output
from cetane.cli.crew import crew


@pytest.mark.parametrize(
    ("scheduler", "told"), [("tcp://far:8786", "waiting for tcp://far:8786\n"), (None, "")]
)
def test_a_scheduler_without_workers_is_waited_for_in_words(
    scheduler: str | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dask has a minute to answer. What comes later is no waiting."""

    @contextmanager
    def slow(*_: object) -> Iterator[None]:
        time.sleep(0.2)
        yield

    file = io.StringIO()
    monkeypatch.setattr(output, "errors", Console(file=file, width=80))
    monkeypatch.setattr(output, "FIRST_LINE_AFTER", 0.05)
    monkeypatch.setattr("cetane.tasks.workers.open_workers", slow)
    monkeypatch.setattr("cetane.store.settings.shared_url", lambda: None)
    with crew(2, scheduler, None):
        time.sleep(0.1)
    assert file.getvalue() == told
