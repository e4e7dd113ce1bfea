"""A small bundle with the results of its gates, and what a report is given beside it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cetane.bundle import Bundle
from cetane.checkpoint import open_checkpoint
from cetane.evaluation.figures import Evaluation, TaskFigure
from cetane.gates.golden import golden
from cetane.gates.residency.measured import specification
from cetane.gates.residency.refuted import Refuted
from cetane.gates.residency.store import MEASURED
from cetane.gates.verdict import at_least
from cetane.hardware.chips import find_chip
from cetane.kit.device import DEVICE, DeviceResult
from cetane.kit.speed import Figures, SpeedCompared
from cetane.lab.entry import ExperimentReport, experiment_report
from cetane.lab.experiment import Experiment, parse_experiment
from cetane.lab.journal import (
    ArmOutcome,
    Figure,
    GateOutcome,
    Intent,
    Journal,
    Outcome,
    Verdict,
)
from cetane.lab.library import Lab, shipped_experiments
from cetane.mil import load
from cetane.pipeline.bench import DraftingBenchmark
from cetane.report.collect import bundle_report
from cetane.report.content.page import BundleReport
from cetane.report.user_files import read_benchmark, read_sweep
from cetane.schema.manifest import MANIFEST
from cetane.speculate.bench import Speed

HOSTILE = "<script>alert(1)</script>\"' onload=x {{ 7 * 7 }} & Ω"
"""What a name or an answer may hold."""


EVALUATION = Evaluation(
    figures=(
        TaskFigure(task="cetane_cloze", metric="acc", samples=40, value=0.61, error=0.078,
                   reference=0.63, difference=-0.02, difference_error=0.013),
        TaskFigure(task="cetane_cloze", metric="perplexity", samples=40, value=14.2,
                   reference=13.9, difference=0.3),
    ),
    limit=40, fewshot=2, chat=True, nats=0.0071, greedy=0.99,
    warnings=("3 answers had less room",),
)  # fmt: skip
"""What `cetane eval --against reference` keeps in a bundle."""


DEVICE_RESULT = DeviceResult(
    name="tiny", passed=True, machine="Made-up M4 Max, macOS 26.1 (25B78)", device=True,
    date="2026-11-20", compute_units="CPU_AND_NE", chip="m4-max",
    checks=(at_least("least logit cosine", 0.99999, 0.9999),), ties=1, positions=13,
    figures=Figures(decode_ms=4.0, decode_tok_s=250.0, prefill_tok_s=900.0, first_token_ms=30.0,
                    load_ms=80.0, peak_bytes=10**8, joules_per_token=0.02, turns=6),
    compared=(SpeedCompared(mode="decode", tokens=1, measured_ms=4.0, predicted_ms=3.0, low=2.5,
                       high=3.5, binds="dispatch"),),
    rules=(Refuted(rule="tiny-program", predicted="CPU", confidence="medium", ops=10, wrong=9,
                   measured={"ANE": 9}, narrow="except kind conv; it held for softmax"),),
    measured_ops=10, faults=("A/chunk-00/decode: died after load: " + HOSTILE,), refusals=(),
    rows=2, caveats=("Power is an estimate.",), notes=(),
)  # fmt: skip
"""What an import keeps. It was made up: nothing was measured."""


@pytest.fixture(scope="session")
def judged(tiny_bundle: Callable[..., Bundle], tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle of two chunks and a head in two, in two modes, after the golden gate."""
    made = tiny_bundle(layout={"kind": "chunks", "chunks": 2}, head={"slices": 2}, verify=None)
    target = tmp_path_factory.mktemp("judged") / "tiny"
    shutil.copytree(made.path, target)
    bundle = Bundle(target)
    checkpoint = open_checkpoint(bundle.manifest.source)
    result = golden(bundle, checkpoint, lambda *_: None, prompts=1, greedy_tokens=16)
    bundle.write_gate("golden", result.model_dump(mode="json"))
    bundle.write_gate("evaluation", EVALUATION.model_dump(mode="json"))
    bundle.write_gate(DEVICE, DEVICE_RESULT.model_dump(mode="json"))
    return bundle


def measured_on_the_ane(bundle: Bundle) -> None:
    """Keep what a Mac would have told that runs every op on the Neural Engine."""
    packages = {}
    for shard in bundle.plan.shards:
        path = bundle.shard(shard.name)
        functions = {
            name: {"ops": [{"output": op.outputs[0].name if op.outputs else "", "kind": op.kind,
                            "device": "ANE"} for op in function.ops]}
            for name, function in load(path).functions.items()
        }  # fmt: skip
        packages[shard.name] = {"specification": specification(path), "functions": functions}
    bundle.write_gate(MEASURED, {"measured": {
        "machine": "Apple M4 Max", "system": "macOS 26.1", "tools": "coremltools 9.0",
        "date": "2026-11-20", "packages": packages,
    }})  # fmt: skip


@pytest.fixture(scope="session")
def bare(tiny_bundle: Callable[..., Bundle], tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle of which nothing is known: no gate has run, and its checkpoint is not here."""
    target = tmp_path_factory.mktemp("bare") / f"{HOSTILE.replace('/', '')}"
    made = tiny_bundle(layout={"kind": "chunks", "chunks": 2}, head={"slices": 2}, verify=None)
    shutil.copytree(made.path, target)
    manifest = json.loads((target / MANIFEST).read_text())
    manifest["source"] = HOSTILE
    manifest["plan"]["recipe"] |= {"name": HOSTILE, "description": HOSTILE}
    (target / MANIFEST).write_text(json.dumps(manifest))
    return Bundle(target)


def speed(category: str, drafter: str, ratio: float) -> Speed:
    """A line of a benchmark."""
    return Speed(
        category=category, drafter=drafter, prompts=1, tokens=32, plain=80.5,
        speculative=80.5 * ratio, ratio=ratio, slowest=ratio, by_calls=ratio, acceptance=0.625,
        tokens_per_call=2.5, verifier_calls=4, fallbacks=3, same=True, first_plain=0.4,
        first_speculative=0.5, reading=0.1,
    )  # fmt: skip


@pytest.fixture(scope="session")
def bench_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `cetane bench --json` printed."""
    path = tmp_path_factory.mktemp("bench") / "bench.json"
    speeds = [speed("chat", "ngram", 0.96), speed("edit", "ngram", 2.31), speed("edit", HOSTILE, 1)]
    seconds = {1: 0.0112, 4: 0.0157}
    benchmark = DraftingBenchmark(Path(HOSTILE), 3, seconds, speeds, idle=True)
    path.write_text(json.dumps(benchmark.as_json()))
    return path


def point(name: str, method: str, bits: float, kl: float, **others: Any) -> dict[str, Any]:
    """A line of a sweep."""
    return {
        "version": 1, "key": name, "name": name, "method": method, "bits": round(bits),
        "group": "32", "compression": {"default": "fp16"}, "weight_bytes": int(1000 * bits),
        "bits_per_weight": bits, "perplexity": 20 + kl, "perplexity_ratio": 1 + kl / 20, "kl": kl,
        "top1": 0.875, "cosines": {"chunk-00": 0.99, "chunk-01": 0.97},
        "smoke": [{"id": "capital", "text": HOSTILE, "same": 1, "expected": False}],
        "predicted": {"chip": "m4-max", "decode_ms": 4.25, "tok_s": 235.3, "binds": "bytes",
                      "weights_off_ane": 0.0, "rules": []},
        "seconds": 1.5, "model": {"source": HOSTILE, "fingerprint": "one"},
        "text": {"name": "text", "sha256": "0", "tokens": 512}, "producer": {},
    } | others  # fmt: skip


@pytest.fixture(scope="session")
def sweep_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a sweep wrote: of four formats one is beaten; the last line is cut off."""
    path = tmp_path_factory.mktemp("sweep") / "sweep.jsonl"
    points = [
        point("other", "kmeans", 5, 1.0, text={"name": "other", "sha256": "1", "tokens": 9}),
        point("fp16", "fp16", 16, 0.0),
        point("palette4-uniform", "uniform", 4.1, 0.5),
        point("palette4-kmeans-group32", "kmeans", 4.1, 0.25),
        point("palette2-kmeans-group32", "kmeans", 2.1, 2.5),
    ]
    path.write_text("".join(json.dumps(p) + "\n" for p in points) + '{"version": 1, "ke')
    return path


@pytest.fixture(scope="session")
def full(judged: Bundle, bench_file: Path, sweep_file: Path) -> BundleReport:
    """Everything that a bundle's page can hold."""
    return bundle_report(
        judged,
        find_chip("m4-max"),
        None,
        read_sweep(sweep_file, "none of these"),
        read_benchmark(bench_file, judged.path),
    )


@pytest.fixture(scope="session")
def empty(bare: Bundle) -> BundleReport:
    """As little as a bundle's page can hold."""
    return bundle_report(bare, find_chip("m4-max"), None, None, None)


def experiment() -> Experiment:
    """One that comes with cetane and is not only planned."""
    return Lab(shipped_experiments()).find("zaya-cca-current-tap")


def arm(factor: float, **metrics: Figure) -> ArmOutcome:
    """What one side came to."""
    return ArmOutcome(
        artefact="ab" * 32,
        recipe="cd" * 32,
        metrics={
            "decode_ms": Figure(value=4 * factor, low=3.5 * factor, high=4.5 * factor, unit="ms",
                                n=5, note=HOSTILE),
            "predicted_ms": Figure(value=31.0, low=28.0, high=40.0, unit="ms", kind="predicted"),
            "weight_bytes": Figure(value=2996120.0, unit="B"),
        } | metrics,
        texts={"capital": HOSTILE},
        curves={HOSTILE: ((16.0, factor), (32.0, factor / 2))},
    )  # fmt: skip


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> ExperimentReport:
    """An experiment after three runs, one of which ended with figures, and a verdict."""
    name, journal = experiment().id, Journal(tmp_path_factory.mktemp("lab") / "journal.jsonl")
    outcomes: dict[str, dict[str, Any]] = {
        "first": {"status": "error", "seconds": 2.0, "error": "disk full"},
        "second": {
            "status": "failed",
            "seconds": 61.5,
            "arms": {
                "baseline": arm(1.0, kl=Figure(value=0.0, unit="nat")),
                "candidate": arm(0.75, kl=Figure(value=0.25, unit="nat"),
                                 top1=Figure(value=0.5, unit="share")),
            },
            "gates": [GateOutcome(metric="kl", arm="candidate", most=0.1, value=0.25,
                                  passed=False)],
            "surprise": HOSTILE,
        },
    }  # fmt: skip
    for index, title in enumerate(("first", "second", "third")):
        intent = Intent(
            run=title, experiment=name, at=f"2026-11-2{index}T10:00:00.000+00:00",
            experiment_sha256="ee" * 32, command=f"cetane lab run {name}",
            recipes={"baseline": "cd" * 32, "candidate": "ce" * 32},
            machine={"system": "Linux", "cores": 2}, versions={"cetane": "0.1.0", "torch": ""},
        )  # fmt: skip
        journal.append(intent)
        if title in outcomes:
            journal.append(Outcome(run=title, experiment=name, at=intent.at, **outcomes[title]))
    journal.append(
        Verdict(
            experiment=name, at="2026-11-22T00:00:00.000+00:00", status="Rejected",
            reason="KL is 0.25 nats, where 0.1 is allowed.", obituary="Nothing was gained.",
        )
    )  # fmt: skip
    return experiment_report(experiment(), journal)


@pytest.fixture(scope="session")
def planned() -> ExperimentReport:
    """An experiment that is only designed."""
    content = {
        "id": "one", "title": "One", "status": "Planned", "date": "2026-04-13",
        "hypothesis": "It halves the caches.", "design": "Keep the half of them.",
        "reported": [{"what": "tok/s", "candidate": "12", "source": "a log"}],
    }  # fmt: skip
    return experiment_report(parse_experiment(content, "one.toml"), Journal(Path("no journal")))
