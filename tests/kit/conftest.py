"""A kit of two tiny bundles, and a record as a Mac would write it."""

import copy
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.measuring.conftest import archive, pair

from cetane.bundle import Bundle
from cetane.measuring.chain import position
from cetane.measuring.record import seal
from cetane.mil import load

__all__ = ["archive", "pair"]
MAC = {
    "mac": True, "chip": "Apple M4 Max", "model": "Mac16,5", "virtual": False,
    "memory_bytes": 51539607552, "system": "macOS 26.1", "build": "25B78", "python": "3.12.4",
    "coremltools": "9.0", "numpy": "2.3.5", "power": "AC Power", "thermal": "", "load": 1.5,
}  # fmt: skip
"""A machine that was made up: nothing in these tests was measured on it."""
SPREAD = {"median_ms": 2.0, "p95_ms": 2.5, "min_ms": 1.9, "count": 100}


@pytest.fixture(scope="session")
def contents(archive: Path) -> Any:
    """`contents(name)`: a file of the kit."""
    packed = zipfile.ZipFile(archive)
    return lambda name: packed.open(f"kit/{name}")


@pytest.fixture(scope="session")
def made_up(contents: Any, pair: tuple[Bundle, Bundle]) -> dict[str, Any]:
    """A record of that machine: the expected outputs, every op on the Neural Engine but softmax."""
    kit = json.load(contents("kit.json"))
    bundles = {}
    for label, bundle in zip("AB", pair, strict=True):
        probes = {}
        for name in kit["bundles"][label]["probes"]:
            expected = np.load(contents(f"{label}/expected-{name}.npy"))
            wave = np.sin(np.arange(expected.shape[1]), dtype=np.float32)
            noisy = expected + np.float32(1e-3) * wave
            probes[name] = [position(a, b) for a, b in zip(noisy, expected, strict=True)]
        ops = [
            {"output": op.outputs[0].name if op.outputs else "", "kind": op.kind, "cost": 0.01,
             "device": None if op.kind == "const" else "CPU" if op.kind == "softmax" else "ANE"}
            for op in load(bundle.shard("model")).functions["decode"].ops
        ]  # fmt: skip
        outputs = [n[4:] for n in np.load(contents(f"{label}/inputs/0000.npz")) if n[:4] == "out/"]
        function = {
            "shard": "model", "function": "decode", "tokens": 1, "compile_ms": 90.0,
            "load_ms": 40.0, "load_again_ms": 9.0, "plan": ops, "peak_bytes": 10**8,
            "predict": {"first_ms": 5.0, "finite": True, **SPREAD,
                        "errors": dict.fromkeys(outputs, 1e-3)},
        }  # fmt: skip
        bundles[label] = {
            "name": f"tiny-{label}", "digest": kit["bundles"][label]["digest"],
            "functions": {"model/decode": function},
            "probes": probes,
        }  # fmt: skip
    turns = [
        {"bundle": label, "turn": turn, "prompt_tokens": 20, "first_token_ms": 40.0,
         "prefill_tok_s": 500.0, "decode_tok_s": 1000 / ms, "shard_ms": {"model": ms - 0.5},
         "decode": {"median_ms": ms, "p95_ms": 1.2 * ms, "min_ms": 0.9 * ms, "count": 8},
         "tokens": [1, 2, 3], "peak_bytes": 10**8}
        for turn in (1, 2) for label, ms in (("A", 4.0), ("B", 3.0))
    ]  # fmt: skip
    energy = [
        {"bundle": "A", "meter": "macmon", "begun": 100.0, "ended": 120.0, "tokens": 5000,
         "samples": 36, "watts": {"cpu": 1.0, "ane": 4.0}, "ane_silent": False, "caveats": ["c"],
         "joules_per_token": {"cpu": 0.004, "ane": 0.016, "processor": 0.02}},
    ]  # fmt: skip
    return {
        "schema_version": 1, "kit": kit["id"], "machine": MAC, "begun": "2026-11-20T10:00:00+00:00",
        "written": "2026-11-20T10:09:00+00:00", "finished": True, "bundles": bundles,
        "options": {"compute_units": "CPU_AND_NE", "rounds": 2, "steps": 3}, "turns": turns,
        "energy": energy, "jobs": {"A/model/decode": {"state": "done", "tries": 1}}, "faults": [],
    }  # fmt: skip


@pytest.fixture
def write(made_up: dict[str, Any], tmp_path: Path) -> Callable[..., Path]:
    """`write(change)`: the record in a file, changed, and sealed again."""

    def written(change: Callable[[dict[str, Any]], object] = lambda _: None) -> Path:
        content = copy.deepcopy(made_up)
        change(content)
        content["seal"] = seal(content)
        path = tmp_path / "measurements.json"
        path.write_text(json.dumps(content))
        return path

    return written
