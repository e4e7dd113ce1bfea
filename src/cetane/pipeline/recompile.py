"""The compilation of a bundle's programs for this build of macOS."""

import time
from pathlib import Path

from cetane.bundle import Bundle
from cetane.engine.coreml import CoreMLBackend
from cetane.files import Progress, silent


def recompile(bundle: str | Path, *, progress: Progress = silent) -> dict[str, float]:
    """Compile and load every shard and every draft head again. Returns the seconds of each, by
    name. CetaneError off a Mac."""
    opened = Bundle(Path(bundle))
    backend = CoreMLBackend(opened)
    opened.verify()
    work = [(backend, shard) for shard in opened.plan.by_name]
    work += [(CoreMLBackend(head), str(kind)) for kind, head in opened.draft_heads().items()]
    seconds: dict[str, float] = {}
    for done, (owner, shard) in enumerate(work):
        progress(shard, done, len(work))
        started = time.perf_counter()
        owner.forget(shard)
        owner.open(shard)
        seconds[shard] = time.perf_counter() - started
    progress("done", len(work), len(work))
    return seconds
