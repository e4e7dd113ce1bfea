"""A whole bundle that a child holds open, as the run gives it orders."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import Json
from .children import Child, ChildFault
from .faults import refusals

if TYPE_CHECKING:
    from .run import KitMeasurement


class OpenChain:
    """The child that holds a whole bundle. It opens on first use; after a fault it stays shut."""

    def __init__(self, run: KitMeasurement, label: str) -> None:
        self.run, self.label, self.job = run, label, ""
        self.child: Child | None = None
        self.broken = False

    def ask(self, job: str, order: Json) -> Json | None:
        """The answer to an order; None if the job was done before, or if it fails.

        The caller keeps the answer, and then calls `done`.
        """
        if self.broken or not self.run.record.open(job):
            return None
        self.job = job
        limit = self.run.options.limit + order.get("seconds", 0)
        try:
            if self.child is None:
                self._open(limit)
            assert self.child is not None
            return self.child.ask(order, limit)
        except ChildFault as error:
            self.broken = True
            if error.kind == "disk full":
                self.run.record.stop(job, error.detail)
            self.run.record.add_fault(job, order["do"], error.kind, error.detail)
            self.run.record.close(job, failed=True)
            self.close()
            return None

    def _open(self, limit: float) -> None:
        run, label = self.run, self.label
        self.child = Child(
            {
                "do": "chain",
                "folder": str(run.folder / label),
                "compiled": str(run.work / label),
                "units": run.options.compute_units,
            }
        )
        count = len(run.kit["bundles"][label]["functions"])
        opened = self.child.ask({"do": "open"}, limit * max(1, count))
        run.record.content["bundles"][label]["chain"] = opened

    def done(self) -> None:
        """Mark the last job as done."""
        self.run.record.close(self.job)

    def close(self) -> None:
        if self.child is not None:
            if lines := refusals(self.child.errors()):
                self.run.record.content["bundles"][self.label]["refusals"] = lines
            self.child.close()
            self.child = None
