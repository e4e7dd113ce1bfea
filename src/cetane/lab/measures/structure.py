"""Measures of structure: recall of needles by distance, and masks of another context."""

import shutil
import tempfile
from pathlib import Path

from cetane.bundle import Bundle
from cetane.files import remove
from cetane.lab.experiment import ArmName
from cetane.lab.needle import LONGEST, recall
from cetane.lab.sides import Findings, Sides, figure, measure_of_both


@measure_of_both("needle")
def needle(sides: Sides) -> dict[ArmName, Findings]:
    """Recall by distance with each side's attention, in a model that searches by content.

    Near ends where the window of a side's full layers ends: the baseline's, else the candidate's.
    Without a window, it ends at a quarter of the context.
    """
    contexts = [side.recipe.cache.context for side in sides.by_arm.values()]
    context = min(LONGEST, *contexts)
    windows = [side.recipe.family.get("full_window") for side in sides.by_arm.values()]
    window = next((size for size in windows if size), context // 4)
    return {
        name: by_distance(
            recall(side.recipe.family, side.recipe.cache.contract, context, window), window
        )
        for name, side in sides.by_arm.items()
    }


def by_distance(recalled: dict[int, float], window: int) -> Findings:
    """The findings of a side, from its share of needles by distance."""
    near = [share for distance, share in recalled.items() if distance < window]
    far = [share for distance, share in recalled.items() if distance >= window]
    note = f"near is less than {window} tokens; a model made by hand"
    return Findings(
        {
            "recall_near": figure("recall_near", sum(near) / len(near), n=len(near), note=note),
            "recall_far": figure("recall_far", sum(far) / len(far), n=len(far), note=note),
        },
        curves={"recall by distance": [(float(d), share) for d, share in recalled.items()]},
    )


@measure_of_both("masks")
def masks(sides: Sides) -> dict[ArmName, Findings]:
    """The mismatches that static checks count in the baseline, and in a wrong candidate.

    The candidate has the baseline's last package in place of its own.
    """
    from cetane.gates.static import static_checks

    findings: dict[ArmName, Findings] = {}
    baseline, candidate = sides.baseline.bundle, sides.candidate.bundle
    last = candidate.plan.shards[-1].name
    with tempfile.TemporaryDirectory(dir=sides.workload.setting.folder) as folder:
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
