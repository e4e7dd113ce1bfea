"""The seconds of a port, by stage."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from cetane.hardware.memory import give_back


@dataclass
class Clock:
    """Seconds by stage, of all attempts."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A context of one stage. Its end adds its seconds to those of the stage, and gives freed
        memory back to the system."""
        started = time.perf_counter()
        try:
            yield
        finally:
            give_back()
            self.add(name, time.perf_counter() - started)

    def add(self, name: str, seconds: float) -> None:
        """Count some seconds more."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
