"""Fuzz for some minutes: `python -m tests.fuzz.run MINUTES [FORMAT ...]`, all formats by default.

Every format has a process of its own and the same time. A finding is kept in `corpus/FORMAT`, which
`make test` replays; it is printed once for each place. The exit code is 1 if there is one.
"""

import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryFile
from typing import Any

from tests.fuzz.formats import FUZZERS
from tests.fuzz.fuzzer import Files, Fuzzer

from cetane.errors import LONGEST, CetaneError

CORPUS = Path(__file__).parent / "corpus"
SLOW = 10
"""Seconds that reading an input may take."""
MEMORY = 2.0
"""Gigabytes that the process of a format may take at its peak."""
GOOD = ("read", "refused")


class Late(BaseException):
    """An input took too long. No `except Exception` hides it."""


def late(*_: Any) -> None:
    raise Late


def outcome(fuzzer: Fuzzer, files: Files) -> str:
    """`read`, `refused`, or what escaped and from where."""
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SLOW)
    try:
        fuzzer.check(files)
        return "read"
    except CetaneError as error:
        line = error.message + (error.hint or "")
        return "refused" if line.isprintable() and len(error.message) <= LONGEST else "bad line"
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [f for f in frames if "/cetane/" in f.filename and "/tests/" not in f.filename]
        place = (ours or frames)[-1]
        return f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def heard() -> Iterator[Callable[[], int]]:
    """Counts the bytes on the error stream: a library may print what a stranger wrote."""
    with TemporaryFile() as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield lambda: os.fstat(file.fileno()).st_size
        finally:
            os.dup2(before, 2)
            os.close(before)


def fuzz(kind: str, seconds: float, first: int) -> int:
    """Try inputs of a format from the number `first` on; how many things were found."""
    fuzzer, seen, number = FUZZERS[kind](), Counter[str](), first
    for files in fuzzer.seeds:
        fuzzer.check(files)  # is read; what it imports takes longer than an input may
    end = time.monotonic() + seconds
    with heard() as printed:
        while time.monotonic() < end:
            before, files = printed(), fuzzer.mutate(Random(number))
            ended = outcome(fuzzer, files)
            ended = ended if printed() == before else "printed something"
            if ended not in GOOD and ended not in seen:
                print(f"{kind} {number}: {ended}", flush=True)
                keep(CORPUS / kind / str(number), files)
            seen[ended] += 1
            number += 1
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    counted = ", ".join(f"{count:,} {what}" for what, count in seen.most_common())
    print(f"{kind}: {number - first:,} inputs from {first}: {counted}; {peak:.2f} GB", flush=True)
    return len(set(seen) - set(GOOD)) + int(peak > MEMORY)


def keep(folder: Path, files: Files) -> None:
    """Write an input where `kept` finds it."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def kept(kind: str) -> list[Path]:
    """The folders of the inputs of a format that were found at some time."""
    return sorted(path for path in (CORPUS / kind).glob("*") if path.is_dir())


def main(minutes: float, kinds: list[str]) -> int:
    """Fuzz the formats one after the other."""
    if len(kinds) == 1:
        return fuzz(kinds[0], 60 * minutes, time.time_ns() // 1_000_000)
    share = str(minutes / len(kinds))
    command = [sys.executable, "-W", "ignore", "-m", "tests.fuzz.run", share]
    return max([subprocess.run([*command, kind], check=False).returncode for kind in kinds])


if __name__ == "__main__":
    sys.exit(min(1, main(float(sys.argv[1]), sys.argv[2:] or list(FUZZERS))))
