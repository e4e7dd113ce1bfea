"""cetane recompile: a bundle's programs for this build of macOS."""

import time
from typing import Any

from cetane.bundle import Bundle
from cetane.cli.output import BundlePath, Json, print_json, progress, table
from cetane.engine.coreml import CoreMLBackend


def recompile(bundle: BundlePath, json: Json = False) -> None:
    """Compile every shard anew and load it, as after an upgrade of the system (macOS)."""
    opened = Bundle(bundle)
    backend = CoreMLBackend(opened)
    opened.verify()
    shards = list(opened.plan.by_name)
    seconds: dict[str, float] = {}
    with progress("recompile") as update:
        for done, shard in enumerate(shards):
            update(shard, done, len(shards))
            started = time.perf_counter()
            backend.forget(shard)
            backend.open(shard)
            seconds[shard] = time.perf_counter() - started
        update("done", len(shards), len(shards))
    if json:
        print_json({"seconds": seconds})
    else:
        rows: list[list[Any]] = [[shard, taken] for shard, taken in seconds.items()]
        table("compiled and loaded (measured)", ["shard", "seconds"], rows)
