"""The gate of a build: the first shard of every kind is judged before the others are made."""

from collections.abc import Mapping
from pathlib import Path

from cetane.checkpoint import Checkpoint
from cetane.files import Progress
from cetane.gates.explain import Explanation, explain_ladder, explain_residency
from cetane.gates.ladder import LadderResult, ladder
from cetane.gates.residency.audit import Audit, audit
from cetane.mil import load
from cetane.pipeline.clock import Clock
from cetane.pipeline.port_result import PortTarget
from cetane.planner import Planner
from cetane.schema.plan import Plan


class FirstShardsFailed(Exception):
    """Stops a build whose first shards are refused; never leaves `Attempt`."""


class FirstShards:
    """The gate of a build: judges the first shard of every kind before the others are made."""

    def __init__(
        self, checkpoint: Checkpoint, asked: PortTarget, clock: Clock, progress: Progress
    ) -> None:
        self.checkpoint, self.asked = checkpoint, asked
        self.clock, self.progress = clock, progress
        self.ladder: LadderResult | None = None
        self.residency: Audit | None = None

    def judge(self, planner: Planner, packages: dict[str, Path]) -> None:
        """Audit the first shards, and compare them with the model. FirstShardsFailed if they leave
        the ANE and must not, or if they differ."""
        self.audit(packages)
        if self.refused is not None:
            raise FirstShardsFailed
        self.progress("first shard of every kind, against the model", 0, 1)
        with self.clock.stage("ladder"):
            self.ladder = ladder(self.checkpoint, planner, packages)
        if not self.ladder.passed:
            raise FirstShardsFailed

    def audit(self, packages: Mapping[str, Path]) -> None:
        """Predict where the ops of some packages run."""
        with self.clock.stage("residency"):
            programs = {name: load(path) for name, path in packages.items()}
            self.residency = audit(programs, self.asked.target)

    @property
    def refused(self) -> Audit | None:
        """The audit, if it is one that refuses the port."""
        audited = self.residency
        return None if audited is None or audited.passed or not self.asked.required else audited

    def explain(self, plan: Plan) -> Explanation | None:
        """Why the first shards were refused; None if they were not."""
        if self.refused is not None:
            return explain_residency(self.refused, plan)
        if self.ladder is not None and not self.ladder.passed:
            return explain_ladder(self.ladder, self.checkpoint, plan.recipe)
        return None
