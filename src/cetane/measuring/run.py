"""The measurement of a kit: every function alone, then the bundles in turns, then their energy.

The record is written after every step. A run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

from . import Json
from .chain import serve
from .children import Child, ChildFault, tell
from .energy import BadSamples, joules
from .faults import refusals
from .functions import measure
from .machine import check, facts, short_of_disk
from .meter import Meter
from .open_chain import OpenChain
from .record import Halt, RunRecord

UNITS = ("CPU_AND_NE", "ALL", "CPU_ONLY", "CPU_AND_GPU")
SPARE = 500_000_000
"""Bytes of disk that stay free."""


def main(folder: Path, arguments: list[str]) -> int:
    """Measure the kit in `folder`. Returns the exit code.

    It is 0, 1 if there are faults, 3 if the script had to stop, 130 if the user stopped it. As a
    child, it is 1 after an error. Wrong options exit with 2, SIGTERM with 143.
    """
    if arguments[:1] == ["--child"]:
        job = json.loads(arguments[1])
        return child(job)
    options = parse(arguments, folder)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return KitMeasurement(folder, options).run()
    except Halt as reason:
        print(f"stopped: {reason}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        print("stopped; run it again: it resumes", file=sys.stderr)
        return 130


def parse(arguments: list[str], folder: Path) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="measure.py", description="Measure the bundles of this kit on this machine."
    )
    parser.add_argument("-o", "--output", type=Path, default=folder / "measurements.json")
    parser.add_argument("--compute-units", choices=UNITS, default="CPU_AND_NE")
    parser.add_argument("--limit", type=float, default=600, help="seconds for one answer")
    parser.add_argument("--rounds", type=at_least(0), default=6, help="turns of every bundle")
    parser.add_argument("--steps", type=at_least(1), default=64, help="decoded tokens of a turn")
    parser.add_argument("--energy", type=float, default=20, help="seconds of load; 0 for none")
    parser.add_argument("--idle", type=float, default=10, help="seconds of rest before each load")
    parser.add_argument("--power", type=Path, help="a file that powermetrics or macmon writes")
    parser.add_argument("--no-plan", action="store_true", help="do not ask for compute plans")
    return parser.parse_args(arguments)


def at_least(least: int) -> Callable[[str], int]:
    """The type of an option: a whole number from `least` on."""

    def read(text: str) -> int:
        number = int(text)
        if number < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}")
        return number

    return read


def child(job: Json) -> int:
    """Do a child's job. An error of Core ML becomes an answer."""
    try:
        serve(job) if job["do"] == "chain" else measure(job)
    except Exception as error:  # whatever it is, the parent records it
        tell({"error": f"{type(error).__name__}: {error}"[:1000]})
        return 1
    return 0


class KitMeasurement:
    """One run of this script: all jobs of a kit that its record does not have yet."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.options = folder, options
        try:
            self.kit: Json = json.loads((folder / "kit.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise Halt(
                f"cannot read {folder / 'kit.json'} ({error}): unpack the kit again"
            ) from None
        self.work = options.output.resolve().parent / f".compiled-{self.kit['id'][:16]}"
        machine = facts()
        needed = 3 * sum(file["bytes"] for file in self.kit["files"].values()) + SPARE
        check(machine, SPARE if self.work.is_dir() else needed, folder)
        verify(folder, self.kit["files"])
        names = ("compute_units", "rounds", "steps")
        self.record = RunRecord(
            options.output,
            {
                "kit": self.kit["id"],
                "machine": machine,
                "options": {name: getattr(options, name) for name in names},
            },
        )

    def run(self) -> int:
        """Do all jobs that are still to do. Returns the exit code."""
        try:
            self.do_jobs()
        except (KeyboardInterrupt, SystemExit):
            self.record.interrupt()
            raise
        return self.conclude()

    def do_jobs(self) -> None:
        """Do the jobs, and mark the record as finished."""
        try:
            self.work.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Halt(f"cannot make {self.work}: {error.strerror}") from error
        content = self.record.content
        for label, bundle in self.kit["bundles"].items():
            content["bundles"].setdefault(
                label, {"name": bundle["name"], "digest": bundle["digest"], "functions": {}}
            )
        self.record.save()
        jobs = list(self.function_jobs())
        for number, (name, label, function) in enumerate(jobs, 1):
            say(f"[{number}/{len(jobs)}] {name}")
            self.measure_function(name, label, function)
        chains = {label: self.chain(label) for label in self.kit["bundles"]}
        try:
            self.run_probes(chains)
            self.measure_turns(chains)
            self.measure_energy(chains)
        finally:
            for chain in chains.values():
                chain.close()
        content["finished"] = True
        self.record.save()
        shutil.rmtree(self.work, ignore_errors=True)

    def chain(self, label: str) -> OpenChain:
        """A bundle that a child opens when it gets its first order."""
        child_job = {
            "do": "chain",
            "folder": str(self.folder / label),
            "compiled": str(self.work / label),
            "units": self.options.compute_units,
        }
        functions = len(self.kit["bundles"][label]["functions"])
        return OpenChain(self.record, label, child_job, functions, self.options.limit)

    def function_jobs(self) -> Iterator[tuple[str, str, Json]]:
        """Every function as a job: its name, its bundle, and its entry in the kit."""
        for label, bundle in self.kit["bundles"].items():
            for function in bundle["functions"]:
                yield f"{label}/{function['shard']}/{function['name']}", label, function

    def measure_function(self, name: str, label: str, function: Json) -> None:
        """Measure a function in a child of its own, and keep every phase as it comes."""
        if not self.record.open(name):
            return
        shard, package = function["shard"], self.folder / label / "shards"
        package /= f"{shard}.mlpackage"
        if lacking := short_of_disk(2 * size(package) + SPARE // 10, self.work):
            self.record.stop(name, lacking)
        (self.work / label).mkdir(exist_ok=True)
        compiled = self.work / label / f"{shard}.mlmodelc"
        kept: Json = {"shard": shard, "function": function["name"], "tokens": function["tokens"]}
        self.record.content["bundles"][label]["functions"][f"{shard}/{function['name']}"] = kept
        made = Child(
            {
                "do": "function",
                "package": str(package),
                "compiled": str(compiled),
                "function": function["name"],
                "several": function["several"],
                "stateful": function["stateful"],
                "zeros": function["zeros"],
                "int8": function["int8"],
                "inputs": str(self.folder / label / function["inputs"]),
                "units": self.options.compute_units,
                "plan": self.record.content["machine"]["mac"] and not self.options.no_plan,
            }
        )
        phase, failed = "start", False
        try:
            while "end" not in (answer := made.answer(self.options.limit)):
                phase = answer.pop("phase")
                self.keep_phase(kept, name, phase, answer)
            kept["peak_bytes"] = answer["peak_bytes"]
        except ChildFault as error:
            if error.kind == "disk full":
                self.record.stop(name, error.detail)
            failed = True
            self.record.add_fault(name, f"after {phase}", error.kind, error.detail)
        finally:
            made.close()
        if lines := refusals(made.errors()):
            kept["refusals"] = lines
        self.record.close(name, failed)

    def keep_phase(self, kept: Json, job: str, phase: str, answer: Json) -> None:
        """Put a phase's figures into the record, under `kept`."""
        match phase:
            case "compile" | "load" | "load again":
                kept[f"{phase.replace(' ', '_')}_ms"] = answer["ms"]
            case "predict":
                kept["predict"] = answer
                if not answer["finite"]:
                    self.record.add_fault(job, phase, "not finite", "an output has NaN or infinity")
            case "plan":
                kept["plan"] = answer["ops"]
        self.record.save()

    def run_probes(self, chains: dict[str, OpenChain]) -> None:
        """Run the probes of every bundle."""
        for label, bundle in self.kit["bundles"].items():
            for index, probe in enumerate(bundle["probes"]):
                answer = chains[label].ask(
                    f"{label}/probe/{probe}", {"do": "probe", "index": index}
                )
                if answer is not None:
                    kept = self.record.content["bundles"][label]
                    kept.setdefault("probes", {})[probe] = answer["positions"]
                    if not all(row["finite"] for row in answer["positions"]):
                        self.record.add_fault(
                            f"{label}/probe/{probe}",
                            "",
                            "not finite",
                            "logits have NaN or infinity",
                        )
                    chains[label].done()

    def measure_turns(self, chains: dict[str, OpenChain]) -> None:
        """Measure the bundles in turns: A B, then B A, so that warming up affects both alike."""
        labels = list(chains)
        for turn in range(self.options.rounds):
            say(f"turn {turn + 1} of {self.options.rounds}")
            for label in labels if turn % 2 == 0 else reversed(labels):
                job = f"{label}/turn/{turn + 1}"
                order = {"do": "turn", "steps": self.options.steps}
                if (answer := chains[label].ask(job, order)) is not None:
                    self.record.content["turns"].append(
                        {"bundle": label, "turn": turn + 1} | answer
                    )
                    chains[label].done()

    def measure_energy(self, chains: dict[str, OpenChain]) -> None:
        """Measure the energy of decoding, if there is a power meter."""
        meter = Meter(self.options.power)
        if not self.options.energy or meter.name is None:
            return
        for label, chain in chains.items():
            job = f"{label}/energy"
            if self.record.ended(job):  # in the run that this one resumes
                continue
            time.sleep(self.options.idle)
            with meter:
                order = {"do": "decode", "seconds": self.options.energy}
                answer = chain.ask(job, order)
            if answer is None:
                continue
            try:
                made = joules(meter.samples(), answer["begun"], answer["ended"], answer["tokens"])
            except BadSamples as error:
                self.record.add_fault(job, "samples", "error", str(error))
                made = None
            if made is not None:
                self.record.content["energy"].append({"bundle": label, "meter": meter.name} | made)
            chain.done()

    def conclude(self) -> int:
        """Print what was recorded. Returns the exit code."""
        content = self.record.content
        for label, bundle in content["bundles"].items():
            medians = [t["decode"]["median_ms"] for t in content["turns"] if t["bundle"] == label]
            if medians:
                say(f"{label} ({bundle['name']}): {median(medians):.2f} ms a token, decoding")
        for one in content["faults"]:
            say(f"fault: {one['job']}: {one['kind']} {one['phase']}: {one['detail'][:160]}")
        say(f"measurements: {self.options.output}; bring that file back: cetane import FILE BUNDLE")
        return 1 if content["faults"] else 0


def verify(folder: Path, files: dict[str, Json]) -> None:
    """Raise Halt if a file of the kit is missing or changed."""
    for name, record in files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != record["bytes"]:
            raise Halt(f"{name} is missing or cut off: unpack the kit again")
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != record["sha256"]:
                raise Halt(f"{name} is not the file of this kit: unpack it again")


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def say(text: str) -> None:
    print(text, flush=True)
