"""Rows of evidence: a kit's measured times, with the work that the cost model counts for each."""

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from cetane.files import write_text
from cetane.kit.measurements import RecordedBundle
from cetane.kit.speed import Figures
from cetane.perf.cost import Work
from cetane.perf.device_rows import COLUMNS
from cetane.perf.predict import Predictor
from cetane.planner import Planner
from cetane.schema.function import Step
from cetane.schema.plan import Plan
from cetane.schema.recipe import Mode


@dataclass(frozen=True)
class EvidenceRow:
    """A row that `cetane.perf.evidence` reads."""

    id: str
    model: str
    chip: str
    what: str
    kind: str
    ms: float
    works: Sequence[Work]
    source: str

    def cells(self) -> dict[str, str]:
        works = [
            {key: value for key, value in asdict(work).items() if value} for work in self.works
        ]
        return {
            name: json.dumps(works) if name == "works" else str(getattr(self, name))
            for name in COLUMNS
        }


def evidence_rows(
    recorded: RecordedBundle,
    own: Figures,
    planner: Planner,
    predictor: Predictor,
    source: str,
) -> Iterator[EvidenceRow]:
    """Rows for decode and verify calls, and for the functions of every shard, with their work.

    `source` says where the figures come from.
    """
    plan, context = planner.plan(), planner.recipe.cache.context
    model, chip, short = recorded.name, predictor.chip.id, recorded.digest[:8]
    for mode in plan.modes:
        works = predictor.works(planner, mode, context)
        step = {"decode": own.decode_ms, "verify": own.verify_ms}.get(mode)
        if step is not None:
            kind = "step" if mode == "decode" else "verify"
            row = f"{short}-{mode}"
            yield EvidenceRow(row, model, chip, f"{mode} step", kind, step, works, source)
        if mode == "verify":
            continue
        for shard, mine in by_shard(planner, mode, works[1:]).items():
            ms = alone(recorded, plan, mode, shard)
            if ms is not None:
                kind = "part" if mode == "decode" else "prefill"
                row = f"{short}-{mode}-{shard}"
                yield EvidenceRow(row, model, chip, f"{mode}: {shard}", kind, ms, mine, source)


def by_shard(planner: Planner, mode: Mode, works: Sequence[Work]) -> dict[str, list[Work]]:
    """The work of every shard in a mode. Shards with routed calls are left out."""
    grouped: dict[str, list[Work]] = {}
    routed = set()
    for call, work in zip(planner.calls(mode), works, strict=True):
        grouped.setdefault(call.segment.shard, []).append(work)
        if call.routed:
            routed.add(call.segment.shard)
    return {shard: mine for shard, mine in grouped.items() if shard not in routed}


def alone(recorded: RecordedBundle, plan: Plan, mode: Mode, shard: str) -> float | None:
    """The sum of the medians of a shard's functions in a mode; None if one was not measured."""
    total = 0.0
    for step in plan.modes[mode].steps:
        if isinstance(step, Step) and step.shard == shard:
            function = recorded.functions.get(f"{shard}/{step.function}")
            if function is None or function.predict is None:
                return None
            total += function.predict.median_ms
    return total or None


def write_rows(rows: Sequence[EvidenceRow], path: Path) -> None:
    """Write rows as a CSV file of evidence."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(row.cells() for row in rows)
    write_text(path, text.getvalue())
