"""The record: `measurements.json`, written whole after every step, under a temporary name first."""

from __future__ import annotations

import hashlib
import json
import os
from datetime import datetime, timezone
from pathlib import Path

from . import Json
from .faults import Kind, fault

SCHEMA = 1
TRIES = 2
"""The most times that the script begins a job which kills it."""
SAME = ("chip", "model", "memory_bytes", "system", "build", "python", "coremltools", "numpy")
"""The facts of the machine on which a record goes on: one record speaks of one machine. Power, heat
and load change meanwhile, and are those of the first start."""


class Halt(Exception):
    """A reason to stop, in words for the user. What was measured is kept."""


def now() -> str:
    """The time in UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")  # noqa: UP017


def seal(content: Json) -> str:
    """sha256 of the record without its seal: shows that a file was changed by hand."""
    bare = {name: value for name, value in content.items() if name != "seal"}
    text = json.dumps(bare, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


class RunRecord:
    """The measurements so far."""

    def __init__(self, path: Path, start: Json) -> None:
        """Continue the record at `path`, or begin it with the content `start`.

        Raises Halt for a record of another kit or machine, and for a damaged one.
        """
        self.path = path
        self.content: Json = {"schema_version": SCHEMA, "begun": now(), **start}
        self.content |= {"bundles": {}, "turns": [], "energy": [], "jobs": {}, "faults": []}
        self.content["finished"] = False
        if path.exists():
            self._resume(start)

    def _resume(self, start: Json) -> None:
        try:
            kept = json.loads(self.path.read_text(encoding="utf-8"))
            whole = kept["seal"] == seal(kept)
        except OSError as error:
            raise Halt(f"cannot read {self.path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError) as error:
            raise Halt(f"{self.path} is damaged ({error}); move it away to begin anew") from None
        if not whole:
            raise Halt(f"{self.path} was changed by hand; move it away to begin anew")
        for name in ("kit", "options"):
            if kept[name] != start[name]:
                raise Halt(f"{self.path} has another {name}; move it away to begin anew")
        for name in SAME:
            before, here = kept["machine"][name], start["machine"][name]
            if before != here:
                raise Halt(
                    f"{self.path} is of another machine or system: its {name} is {before}, and "
                    f"here it is {here}; move it away to begin anew"
                )
        self.content = kept
        for name, job in kept["jobs"].items():
            if job["state"] == "running":
                self.add_fault(name, "", "interrupted", "this script ended while the job ran")
                job["state"] = "begun" if job["tries"] < TRIES else "fault"

    def ended(self, job: str) -> bool:
        """Whether a job is done, or has failed too often."""
        return self.content["jobs"].get(job, {}).get("state") in ("done", "fault")

    def open(self, job: str) -> bool:
        """Whether a job is still to do. If so, it is now marked as running."""
        if self.ended(job):
            return False
        known = self.content["jobs"].get(job, {"tries": 0})
        self.content["jobs"][job] = {"state": "running", "tries": known["tries"] + 1}
        self.save()
        return True

    def close(self, job: str, failed: bool = False) -> None:
        """Mark a job as done, or as failed."""
        self.content["jobs"][job]["state"] = "fault" if failed else "done"
        self.save()

    def stop(self, job: str, reason: str) -> None:
        """Raise Halt for a full disk. That is no fault of the job, so the job is tried again."""
        self.add_fault(job, "", "disk full", reason)
        self.content["jobs"].setdefault(job, {"tries": 1})["state"] = "begun"
        self.save()
        raise Halt(f"{reason}; free some space and run this again: it resumes")

    def interrupt(self) -> None:
        """Take back the running job's try: the user stopped it, which is no fault of the job."""
        jobs = self.content["jobs"]
        for name, job in [*jobs.items()]:
            if job["state"] == "running":
                job.update(state="begun", tries=job["tries"] - 1)
                if not job["tries"]:
                    del jobs[name]
        self.save()

    def add_fault(self, job: str, phase: str, kind: Kind, detail: str) -> None:
        self.content["faults"].append(fault(job, phase, kind, detail) | {"at": now()})

    def save(self) -> None:
        """Write the record. Raises Halt if the disk is full; the file then has its old content."""
        self.content["written"] = now()
        self.content["seal"] = seal(self.content)
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        try:
            with temporary.open("w", encoding="utf-8") as file:
                json.dump(self.content, file, indent=1, allow_nan=False)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise Halt(f"cannot write {self.path}: {error.strerror}; free some space") from error
