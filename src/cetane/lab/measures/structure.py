"""Measures of structure: recall of needles by distance, and masks of another context."""

import shutil
import tempfile
from pathlib import Path

from cetane.bundle import Bundle
from cetane.files import remove
from cetane.lab.experiment import ArmName
from cetane.lab.needle import DISTANCES, WINDOW, recall
from cetane.lab.sides import Findings, Side, Sides, each, figure, measure


@each("needle")
def needle(side: Side) -> Findings:
    """Recall by distance with the arm's own attention, in a model that searches by content."""
    recalled = recall(side.recipe.family, side.recipe.cache.contract)
    near = [share for distance, share in recalled.items() if distance < WINDOW]
    far = [share for distance, share in recalled.items() if distance >= WINDOW]
    note = f"near is less than {WINDOW} tokens; a model made by hand"
    return Findings(
        {
            "recall_near": figure("recall_near", sum(near) / len(near), n=len(near), note=note),
            "recall_far": figure("recall_far", sum(far) / len(far), n=len(far), note=note),
        },
        curves={"recall by distance": [(float(d), recalled[d]) for d in DISTANCES]},
    )


@measure("masks")
def masks(bench: Sides) -> dict[ArmName, Findings]:
    """The mismatches that static checks count in the baseline, and in a wrong candidate.

    The candidate has the baseline's last package in place of its own.
    """
    from cetane.gates.static import static_checks

    findings: dict[ArmName, Findings] = {}
    baseline, candidate = bench.baseline.bundle, bench.candidate.bundle
    last = candidate.plan.shards[-1].name
    with tempfile.TemporaryDirectory(dir=bench.workload.setting.folder) as folder:
        mixed = Path(folder) / "mixed"
        shutil.copytree(candidate.path, mixed)
        remove(Bundle(mixed).shard(last))
        shutil.copytree(baseline.shard(last), Bundle(mixed).shard(last))
        for name, bundle in (("baseline", baseline), ("candidate", Bundle(mixed))):
            wrong = static_checks(bundle)
            texts = {"masks": "; ".join(map(str, wrong[:3]))} if wrong else {}
            figures = {"mask_mismatches": figure("mask_mismatches", len(wrong))}
            findings["baseline" if name == "baseline" else "candidate"] = Findings(figures, texts)
    return findings
