"""Fuzz one format: `python -m tests.fuzz.run FORMAT COUNT SEED`; each finding is printed once."""

import resource
import sys
import time
import traceback
from collections import Counter
from random import Random

from tests.fuzz.formats import FUZZERS, Fuzzer

from cetane.errors import CetaneError

SLOW = 10.0
"""Seconds that reading an input may take."""


def outcome(fuzzer: Fuzzer, files: dict[str, bytes]) -> str:
    """`read`, `refused`, or what escaped and from where."""
    start = time.monotonic()
    try:
        fuzzer.check(files)
        ended = "read"
    except CetaneError as error:
        line = error.message + (error.hint or "")
        ended = "refused" if line.isprintable() and len(error.message) <= 300 else "bad line"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        ours = [f for f in frames if "cetane" in f.filename] or frames
        ended = f"{type(error).__name__} at {ours[-1].filename}:{ours[-1].lineno}"
    return "slow" if time.monotonic() - start > SLOW else ended


def main() -> int:
    kind, count, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    fuzzer, seen = FUZZERS[kind](), Counter[str]()
    for number in range(seed, seed + count):
        files = fuzzer.mutate(Random(number))
        ended = outcome(fuzzer, files)
        if ended not in ("read", "refused") and ended not in seen:
            print(f"{kind} {number}: {ended}", flush=True)
        seen[ended] += 1
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"{kind}: {count} inputs from {seed}: {dict(seen)}; peak {memory:.2f} GB", flush=True)
    return int(set(seen) > {"read", "refused"})


if __name__ == "__main__":
    sys.exit(main())
