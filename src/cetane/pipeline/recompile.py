"""A bundle's programs for this build of macOS."""

import time
from pathlib import Path

from cetane.bundle import Bundle
from cetane.engine.coreml import CoreMLBackend
from cetane.files import Progress, silent


def recompile(bundle: str | Path, *, progress: Progress = silent) -> dict[str, float]:
    """Compile and load every shard again. Returns seconds by shard. CetaneError off a Mac."""
    opened = Bundle(Path(bundle))
    backend = CoreMLBackend(opened)
    opened.verify()
    shards = list(opened.plan.by_name)
    seconds: dict[str, float] = {}
    for done, shard in enumerate(shards):
        progress(shard, done, len(shards))
        started = time.perf_counter()
        backend.forget(shard)
        backend.open(shard)
        seconds[shard] = time.perf_counter() - started
    progress("done", len(shards), len(shards))
    return seconds
