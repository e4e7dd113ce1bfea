"""A whole bundle that a child holds open, as the run gives it orders."""

from __future__ import annotations

from . import Json
from .children import Child, ChildFault
from .faults import refusals
from .record import RunRecord


class OpenChain:
    """The child that holds a whole bundle. It opens on first use; after a fault it stays shut."""

    def __init__(
        self, record: RunRecord, label: str, child_job: Json, functions: int, limit: float
    ) -> None:
        """`child_job` opens the bundle `label`, which has so many functions. `limit` is in seconds,
        for one answer; while the bundle opens, for each function."""
        self.record, self.label, self.job = record, label, ""
        self.child_job, self.functions, self.limit = child_job, functions, limit
        self.child: Child | None = None
        self.broken = False

    def ask(self, job: str, order: Json) -> Json | None:
        """The answer to an order; None if the job was done before, or if it fails.

        The caller keeps the answer, and then calls `done`.
        """
        if self.broken or not self.record.open(job):
            return None
        self.job = job
        limit = self.limit + order.get("seconds", 0)
        try:
            if self.child is None:
                self._open(limit)
            assert self.child is not None
            return self.child.ask(order, limit)
        except ChildFault as error:
            self.broken = True
            if error.kind == "disk full":
                self.record.stop(job, error.detail)
            self.record.add_fault(job, order["do"], error.kind, error.detail)
            self.record.close(job, failed=True)
            self.close()
            return None

    def _open(self, limit: float) -> None:
        self.child = Child(self.child_job)
        opened = self.child.ask({"do": "open"}, limit * max(1, self.functions))
        self.record.content["bundles"][self.label]["chain"] = opened

    def done(self) -> None:
        """Mark the last job as done."""
        self.record.close(self.job)

    def close(self) -> None:
        if self.child is not None:
            if lines := refusals(self.child.errors()):
                self.record.content["bundles"][self.label]["refusals"] = lines
            self.child.close()
            self.child = None
