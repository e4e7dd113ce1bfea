"""A sandbox: a child process for a library that trusts foreign files.

Such a library may write gigabytes, loop or abort. None of these can be caught.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

KEPT = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
"""Variables that a child keeps: without them it may not find what Python itself is linked to."""


@dataclass(frozen=True)
class Sandbox:
    """Python code that runs by itself. It gets the path of a file or folder as `sys.argv[1]`, or
    content on its standard input."""

    code: str
    seconds: int
    """CPU seconds."""
    memory: int
    """Bytes of address space."""
    patience: int
    """Seconds by the clock."""
    environment: dict[str, str]
    """The only variables that it sees, beside `KEPT`."""

    def run(
        self, path: Path | None = None, content: bytes = b""
    ) -> subprocess.CompletedProcess[bytes]:
        """Run it to its end. Raises subprocess.TimeoutExpired when the patience is over."""
        # -I hides the user's own site-packages and PYTHONPATH, where a library may lie.
        begin = f"""
import resource, sys
sys.path[:] = {sys.path!r}
# The signal of the softer limit tells that time was over; that of the other is anybody's.
for limit, soft, most in ((resource.RLIMIT_CPU, {self.seconds}, {self.seconds + 1}),
                          (resource.RLIMIT_AS, {self.memory}, {self.memory}),
                          (resource.RLIMIT_CORE, 0, 0)):
    try:
        resource.setrlimit(limit, (soft, most))
    except (ValueError, OSError):  # macOS has no limit of address space
        if sys.platform != "darwin":
            raise
"""
        return subprocess.run(
            [sys.executable, "-I", "-c", begin + self.code, str(path or "")],
            input=content, capture_output=True, timeout=self.patience, check=False,
            env={name: os.environ[name] for name in KEPT if name in os.environ} | self.environment,
        )  # fmt: skip

    def succeeds(self, content: bytes) -> bool:
        """Whether it ends well and in time with some content."""
        try:
            return self.run(content=content).returncode == 0
        except subprocess.TimeoutExpired:
            return False
