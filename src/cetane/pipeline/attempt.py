"""One build of a port, its gates, and how the port came to its recipe."""

import time
from dataclasses import dataclass
from pathlib import Path

from cetane.bundle import Bundle
from cetane.files import Progress
from cetane.gates.residency.store import InBundle
from cetane.pipeline.build import build
from cetane.pipeline.clock import Clock
from cetane.pipeline.first_shards import FirstShards, FirstShardsFailed
from cetane.pipeline.golden_gate import judge
from cetane.pipeline.plan import forecast
from cetane.pipeline.port_result import PortResult, PortTarget, gate_json
from cetane.pipeline.request import Request
from cetane.planner import Planner
from cetane.schema.recipe import Recipe
from cetane.tasks.workers import Workers
from cetane.validation import Data, validated

HISTORY = "history"
"""The file of a port's history, among a bundle's gates."""


class PortHistory(Data):
    """How a port came to its bundle's recipe. It lies beside the gates' results if a gate was red.

    When the same port runs again, the history tells it that the bundle is its own.
    """

    first: Recipe
    """The first recipe that was built."""
    changes: tuple[str, ...]
    """What was changed after a red gate, and why: one line each."""

    @classmethod
    def of(cls, target: Path) -> "PortHistory | None":
        """The history of the bundle at `target`; None without a bundle or a red gate."""
        kept = Bundle(target).gates().get(HISTORY) if target.exists() else None
        if kept is None:
            return None
        return validated(cls, kept, f"{target}: {HISTORY}.json", "--force replaces the bundle")

    def keep(self, bundle: Bundle) -> None:
        """Write it, if there is something to tell."""
        if self.changes:
            bundle.write_gate(HISTORY, self.model_dump(mode="json"))


@dataclass
class Attempt:
    """One build of a port, and its gates."""

    request: Request
    recipe: Recipe
    target: Path
    asked: PortTarget
    history: PortHistory
    clock: Clock
    progress: Progress
    workers: Workers | None = None

    def run(self, force: bool, rebuild: bool) -> PortResult:
        """Build and judge. Parts that were built of the same recipe before are kept, unless
        `rebuild`; `force` replaces another bundle at the target."""
        request, clock, progress = self.request, self.clock, self.progress
        planner = Planner(request.checkpoint, self.recipe, request.planner)
        plan, speed = planner.plan(), forecast(planner, self.asked.target.chip)
        first = FirstShards(request.checkpoint, self.asked, clock, progress)
        judged_before = sum(clock.seconds.values())
        started = time.perf_counter()
        try:
            bundle = build(
                request.checkpoint, self.recipe, self.target,
                lambda what, done, total: progress(f"build {what}", done, total),
                force=force, gate=first.judge, rebuild=rebuild, workers=self.workers,
            )  # fmt: skip
        except FirstShardsFailed:
            return PortResult(
                plan=plan, bundle=None, ladder=first.ladder, residency=first.residency, golden=None,
                explanation=first.explain(plan), forecast=speed, seconds=clock.seconds,
                residency_required=self.asked.required,
            )  # fmt: skip
        spent = time.perf_counter() - started
        clock.add("build", spent - (sum(clock.seconds.values()) - judged_before))
        if first.residency is None and self.asked.required:
            first.audit(InBundle(bundle).packages)
        self.history.keep(bundle)
        for name, outcome in (("ladder", first.ladder), ("residency", first.residency)):
            if outcome is not None:
                bundle.write_gate(name, gate_json(outcome))
        with clock.stage("golden"):
            golden, why = judge(bundle, request.checkpoint, progress)
        return PortResult(
            plan=plan, bundle=bundle, ladder=first.ladder, residency=first.residency, golden=golden,
            explanation=why or first.explain(plan), forecast=speed, seconds=clock.seconds,
            residency_required=self.asked.required,
        )  # fmt: skip
