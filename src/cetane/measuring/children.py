"""Child processes: each opens programs, and can hang or die without taking the measurement along.

A failed compilation for the Neural Engine can hang its process, or end it with SIGKILL at the first
prediction (coremltools #2758). A child answers with one line of JSON after every phase, so what it
measured before a fault is kept.
"""

from __future__ import annotations

import errno
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from typing import IO

from . import Json
from .faults import Kind, ending, last_lines

MARK = "#measured "
"""The start of an answer's line: libraries may print lines of their own."""


class ChildFault(Exception):
    """A child that did not answer, or that answered with an error."""

    def __init__(self, kind: Kind, detail: str) -> None:
        self.kind, self.detail = kind, detail
        super().__init__(detail)


def command(job: Json) -> list[str]:
    """The command of a child: this script as it was called, with the job in place of its arguments.

    So a wrapper in front of the script, such as `python -m cetane.bridge`, also runs the children.
    """
    words = list(sys.orig_argv)
    script = len(words) - len(sys.argv)  # a wrapper may spell its name in another way
    return [sys.executable, *words[1 : script + 1], "--child", json.dumps(job)]


class Child:
    """A running child."""

    def __init__(self, job: Json) -> None:
        self.stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            command(job), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.stderr,
            text=True, start_new_session=True,
        )  # fmt: skip
        self.lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def ask(self, order: Json, limit: float) -> Json:
        """Send an order, and wait `limit` seconds for its answer. Raises ChildFault as `answer`."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it died: `answer` tells how
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()
        return self.answer(limit)

    def answer(self, limit: float) -> Json:
        """The next answer. Raises ChildFault if none comes in `limit` seconds, and if the child
        dies or answers with an error."""
        until = time.monotonic() + limit
        while True:
            try:
                line = self.lines.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                self.kill()
                raise ChildFault("time limit", f"no answer in {limit:g} s") from None
            if line is None:
                code = self.process.wait()
                raise ChildFault("died", f"{ending(code)}: {last_lines(self.errors())}")
            if line.startswith(MARK):
                try:
                    content: Json = json.loads(line[len(MARK) :])
                except ValueError:  # it died within this line; the end of its output follows
                    continue
                if "error" in content:
                    full = os.strerror(errno.ENOSPC) in content["error"]
                    raise ChildFault("disk full" if full else "error", content["error"])
                return content

    def errors(self) -> str:
        """The child's stderr so far, at most its last MiB."""
        self.stderr.flush()
        size = os.fstat(self.stderr.fileno()).st_size
        return os.pread(self.stderr.fileno(), 1 << 20, max(0, size - (1 << 20))).decode(
            "utf-8", "replace"
        )

    def kill(self) -> None:
        """End the child and all processes that it started, at once."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Close the child's stdin, and kill it if it does not end in 5 seconds."""
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.kill()


def tell(content: Json) -> None:
    """Answer the parent; called in a child."""
    print(MARK + json.dumps(content), flush=True)
