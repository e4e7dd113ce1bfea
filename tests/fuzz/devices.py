"""Fuzzers of files that come back from a Mac."""

import json
import plistlib
from datetime import datetime
from pathlib import Path
from random import Random

from tests.fuzz.fuzzer import Document, Files, Fuzzer
from tests.fuzz.values import torn

SHA = "ab" * 32


def kit_measurements() -> Document:
    """What a kit's script recorded; the seal fits whatever was damaged."""
    from cetane.kit.measurements import read_measurements
    from cetane.measuring.record import seal

    spread = {"median_ms": 2.0, "p95_ms": 2.5, "min_ms": 1.9, "count": 100}
    op = {"kind": "conv", "output": "y", "device": "ANE", "cost": 0.5}
    function = {
        "shard": "s", "function": "decode", "tokens": 1, "load_ms": 40.0, "plan": [op],
        "predict": {"first_ms": 5.0, "finite": True, "errors": {"y": 1e-3}, **spread},
        "refusals": ["ANECCompile() FAILED"],
    }  # fmt: skip
    row = {"expected": 3, "margin": 0.5, "finite": True, "top": [[3, 1.5], [2, 1.0]],
           "cosine": 0.9999, "kl": 1e-5, "largest_error": 0.01}  # fmt: skip
    turn = {
        "bundle": "A", "turn": 1, "prompt_tokens": 20, "first_token_ms": 40.0,
        "prefill_tok_s": 500.0, "decode_tok_s": 400.0, "shard_ms": {"s": 2.0}, "decode": spread,
        "tokens": [1, 2], "peak_bytes": 10**8,
    }  # fmt: skip
    energy = {
        "bundle": "A", "meter": "macmon", "begun": 100.0, "ended": 120.0, "tokens": 5000,
        "samples": 36, "watts": {"cpu": 1.0}, "ane_silent": False, "caveats": ["c"],
        "joules_per_token": {"cpu": 0.004, "processor": 0.004},
    }  # fmt: skip
    machine = {
        "mac": True, "chip": "Apple M4", "model": "Mac16,1", "virtual": False, "memory_bytes": 1,
        "system": "macOS 26.1", "build": "25B78", "python": "3.12", "coremltools": "9.0",
        "numpy": "2", "power": "", "thermal": "", "load": 0.5,
    }  # fmt: skip
    bundle = {"name": "a", "digest": SHA, "functions": {"s/decode": function},
              "probes": {"text": [row]}}  # fmt: skip
    fault = {"job": "A/x", "phase": "", "kind": "died", "detail": "d", "at": "now"}
    content = {
        "schema_version": 1, "kit": SHA, "machine": machine,
        "begun": "2026-11-01T10:00:00", "written": "2026-11-01T10:05:00",
        "options": {"compute_units": "CPU_AND_NE", "rounds": 1, "steps": 2}, "finished": True,
        "bundles": {"A": bundle}, "turns": [turn], "energy": [energy], "faults": [fault],
        "jobs": {"A/x": {"state": "done", "tries": 1}}, "seal": SHA,
    }  # fmt: skip

    def read(path: Path) -> None:
        try:
            damaged = json.loads(path.read_bytes())
            path.write_text(json.dumps(damaged | {"seal": seal(damaged)}))
        except (ValueError, TypeError, AttributeError, RecursionError):
            pass  # it is read as it is
        read_measurements(path)

    return Document("measurements.json", [content], read)


def performance_report() -> Document:
    """Xcode's report."""
    from cetane.kit.xcode import read_report

    op = {
        "operatorName": "ios18.conv", "cost": {"weight": 0.5}, "outputs": [{"name": "y"}],
        "deviceUsage": {"preferred": {"deviceType": {"neuralEngine": {}}}},
    }  # fmt: skip
    program = {"_0": {"functions": {"main": {"block": {"operations": [op]}}}}}
    results = {"predict": {"samples": [0.1, 0.2]}, "modelStructure": {"program": program}}
    content = {"deviceInfo": {"modelName": "M4"}, "computeUnit": 3, "deviceResults": results}
    return Document("report.json", [content], lambda path: read_report(path.parent))


class Text(Fuzzer):
    """A file that is no JSON, damaged by bytes."""

    name: str
    good: tuple[bytes, ...]

    @property
    def seeds(self) -> list[Files]:
        return [{self.name: content} for content in self.good]

    def mutate(self, random: Random) -> Files:
        return {self.name: torn(random, random.choice(self.good))}


class Meter(Text):
    """A power meter's file."""

    name = "power"
    good = (
        b"\0".join(
            plistlib.dumps(
                {"elapsed_ns": 10**9, "timestamp": datetime(2026, 11, 22, 12, 0, second),
                 "processor": {"cpu_energy": 1500, "ane_power": 10.5}}
            )
            for second in range(1, 6)
        ),
        b"".join(
            b'{"timestamp":"2026-11-22T12:00:0%d+00:00","cpu_power":1.5,"ane_power":0.5}\n' % second
            for second in range(1, 6)
        ),
    )  # fmt: skip

    def check(self, files: Files) -> None:
        from cetane.pipeline.import_power import import_power

        self.write(files)
        import_power(self.folder / self.name, tokens=10)


class Analytics(Text):
    """Core ML's analytics.mil."""

    name = "analytics.mil"
    good = (
        b"program(1.3)\n{\n    func main<ios18>(tensor<fp16, [1, 4]> x) {\n"
        b"        tensor<fp16, [1, 4]> y = relu(x = x)"
        b'[EstimatedRuntime = dict<string, fp64>({{"ane", 1.5e-06}, {"bnns", 0x1p-10}}), '
        b'ValidationMessage = dict<string, string>({{"ane", "Unsupported \\"axis\\""}}), '
        b'SelectedBackend = string("bnns"), name = string("y")];\n    } -> (y);\n}\n',
    )

    def check(self, files: Files) -> None:
        from cetane.kit.analytics import read_analytics

        self.write(files)
        read_analytics(self.folder / self.name)
