"""Injected faults in jobs, from build to add-head. Nothing is lost, and a job that resumes comes to
what an undisturbed one comes to.

python benchmarks/faults.py [--faults 1000] [--jobs build port ...] [--json FILE]

A fault lies at one change of the file system (`tests/faults/injected.py`): a kill, a disk that is
full from then on, or one I/O error. The models are tiny; every change of a job is as likely.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from tests.conftest import build_model, build_tokenizer, tiny_recipe
from tests.converting import TEMPLATES, converted_once
from tests.faults.injected import FAULTS, KILLED, Fault, changes, hit
from tests.faults.jobs import Job, jobs, prepare

from cetane.checkpoint import open_checkpoint
from cetane.pipeline.build import build

SHARES = {
    "build": 0.31, "port": 0.13, "sweep": 0.07, "lab run": 0.24, "train-head": 0.06,
    "add-head": 0.03, "port, its cache": 0.03, "build, small TMPDIR": 0.02,
    "build, clock back": 0.03, "build, small disk": 0.03, "port, small disk": 0.01,
    "sweep, small disk": 0.01, "lab run, small disk": 0.02, "train-head, small disk": 0.01,
}  # fmt: skip
"""Of all faults. A clock goes back by a day between the fault and the next run. A small disk is a
real one, full at any byte, in native code too; only root can mount it."""
DAY = 86_400
LEFT = {"out", "out.partial", ".out.lock", "text.txt", "small.toml", "tiny.toml", "bundle", "sweep",
        "lab", "journal.jsonl", "cache"}  # fmt: skip
"""What may lie beside a job's result."""


@dataclass
class Row:
    """What became of the faults in one job."""

    job: str
    changes: int
    """Of the file system; bytes that are written, for a small disk."""
    ended: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    """Which faults were not survived, and how."""

    def note(self, fault: str, problem: str) -> None:
        if problem:
            self.lost.append(f"{fault}: {problem}")
            print(f"{self.job}: {self.lost[-1]}", flush=True)

    def as_json(self) -> dict[str, Any]:
        return {"job": self.job, "changes": self.changes, "ended": self.ended, "lost": self.lost}


class Faults:
    """Jobs in folders of their own, hit once each."""

    def __init__(self, names: Sequence[str], root: Path, model: Path, bundle: Path) -> None:
        self.root, self.bundle = root, bundle
        recipe = tiny_recipe(verify=4, prefill=None, context=64, layout={"kind": "per-block"})
        known = jobs(model, recipe, root / "source")
        if "add-head" in names:
            prepare(root / "source", bundle)
            known["train-head"].run(root / "source")
        checkpoint = open_checkpoint(model)

        def building(folder: Path) -> object:
            return build(checkpoint, recipe, folder / "out", lambda *_: None)

        self.jobs = {"build": Job(building, known["port"].result), **known}

    def row(self, name: str, count: int, draw: random.Random) -> Row:
        """Some faults in one job."""
        job, place = self.jobs[name.partition(",")[0]], name.partition(", ")[2]
        if place.startswith("small"):
            return self.small_disks(name, job, count, draw)
        with self.fresh(place) as (folder, watched):
            total = changes((watched,), lambda: job.run(folder))
            wanted = job.result(folder)
        row = Row(name, total)
        spots = [(fault, at) for at in range(1, total + 1) for fault in FAULTS]
        for fault, at in draw.sample(spots, min(count, len(spots))):
            with self.fresh(place) as (folder, watched):
                row.ended[fault] += 1
                problem = self.hit(job, folder, watched, fault, at, place, wanted)
            row.note(f"{fault} at {at}", problem)
        return row

    def small_disks(self, name: str, job: Job, count: int, draw: random.Random) -> Row:
        """A job on disks that have room for a part of what it writes, then for all."""
        row = Row(name, 0)
        if os.geteuid():
            return row
        disk, temporary = self.root / "disk", name.endswith("TMPDIR")
        disk.mkdir(exist_ok=True)
        folder = self.root / "job" if temporary else disk / "job"
        for number in range(count + 1):
            with mounted(disk), temporary_folder(disk if temporary else None):
                shutil.rmtree(folder, ignore_errors=True)
                prepare(folder, self.bundle)
                before = used(disk)
                if not number:
                    job.run(folder)
                    wanted = job.result(folder)
                    # What a conversion leaves behind tells nothing of what it takes.
                    row.changes = CONVERTED if temporary else used(disk) - before
                    continue
                at = draw.randrange(row.changes)
                resize(disk, before + 4096 + at)  # no size is no limit
                row.ended["full"] += 1
                code = hit((disk,), lambda: converting(job, folder), "kill", sys.maxsize)
                resize(disk, LARGE)
                odd = "" if code in (0, 2) else f"exit code {code}"
                row.note(f"full after {at} bytes", odd or self.resumed(job, folder, wanted))
        return row

    @contextmanager
    def fresh(self, place: str) -> Iterator[tuple[Path, Path]]:
        """A prepared folder, and the part of it that is watched."""
        folder = self.root / "job"
        shutil.rmtree(folder, ignore_errors=True)
        prepare(folder, self.bundle)
        before, cache = os.environ["CETANE_CACHE"], folder / "cache"
        cache.mkdir()
        if place == "its cache":
            os.environ["CETANE_CACHE"] = str(cache)
        try:
            yield folder, cache if place == "its cache" else folder
        finally:
            os.environ["CETANE_CACHE"] = before

    def hit(
        self, job: Job, folder: Path, watched: Path, fault: Fault, at: int, place: str,
        wanted: bytes,
    ) -> str:  # fmt: skip
        """Hit a job at a change, run it again, and compare; "" if all is as it should be."""
        code = hit((watched,), lambda: job.run(folder), fault, at)
        if code not in ((KILLED, 0) if fault == "kill" else (0, 2)):
            return f"exit code {code}"
        if place == "clock back":  # all that was written lies in the future
            for path in folder.rglob("*"):
                os.utime(path, (time.time() + DAY,) * 2)
        return self.resumed(job, folder, wanted)

    def resumed(self, job: Job, folder: Path, wanted: bytes) -> str:
        """Run a job that something has ended; "" if it comes to what it should."""
        try:
            job.run(folder)
            result = job.result(folder)
        except Exception as error:
            return f"the next run: {type(error).__name__}: {error}"
        odd = {path.name for path in folder.iterdir()} - LEFT
        return f"left {odd}" if odd else "" if result == wanted else "another result"


LARGE, CONVERTED = 1 << 30, 200_000
"""Bytes of a disk, and of what conversions of the tiny model write into TMPDIR."""


def converting(job: Job, folder: Path) -> None:
    """Run a job that finds nothing converted."""
    TEMPLATES.clear()
    job.run(folder)


@contextmanager
def temporary_folder(folder: Path | None) -> Iterator[None]:
    """Let temporary files go elsewhere."""
    before = tempfile.tempdir, os.environ.get("TMPDIR")
    if folder is not None:
        tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before[0]
        os.environ.pop("TMPDIR", None)
        if before[1] is not None:
            os.environ["TMPDIR"] = before[1]


@contextmanager
def mounted(disk: Path) -> Iterator[None]:
    """A disk in memory."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={LARGE}", "tmpfs", disk], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def resize(disk: Path, size: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", disk], check=True)


def used(disk: Path) -> int:
    return shutil.disk_usage(disk).used


def tiny(root: Path) -> tuple[Path, Path]:
    """A checkpoint and a bundle of it."""
    model = root / "model"
    build_model("llama").save_pretrained(model)
    build_tokenizer().save_pretrained(model)
    recipe = tiny_recipe(verify=4, prefill=None, layout={"kind": "per-block"}, context=64)
    return model, build(open_checkpoint(model), recipe, root / "bundle", lambda *_: None).path


def show(rows: list[Row]) -> None:
    """A table for docs/reference/robustness.md."""
    print("| job | changes | kills | disk full | I/O error | lost or different |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        counts = " | ".join(str(row.ended[fault]) for fault in FAULTS)
        print(f"| {row.job} | {row.changes} | {counts} | {len(row.lost)} |")
    total = [sum(row.ended[fault] for row in rows) for fault in FAULTS]
    lost = sum(len(row.lost) for row in rows)
    print(f"| all | | {' | '.join(map(str, total))} | {lost} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--jobs", nargs="+", default=list(SHARES), choices=list(SHARES))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as name, converted_once():
        root = Path(name)
        os.environ["CETANE_CACHE"] = str(root / "cache")
        faults = Faults(options.jobs, root, *tiny(root))
        for job in options.jobs:
            draw = random.Random(f"{options.seed} {job}")
            rows.append(faults.row(job, round(SHARES[job] * options.faults), draw))
            print(json.dumps(rows[-1].as_json()), flush=True)
    show(rows)
    if options.json:
        options.json.write_text(json.dumps([row.as_json() for row in rows], indent=1) + "\n")
    return int(any(row.lost for row in rows))


if __name__ == "__main__":
    sys.exit(main())
