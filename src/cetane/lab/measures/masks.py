"""A measure of static checks: masks of another context, in a bundle that is wrong on purpose."""

import shutil
import tempfile
from pathlib import Path

from cetane.bundle import Bundle
from cetane.files import remove
from cetane.gates.static import static_checks
from cetane.lab.experiment import ArmName
from cetane.lab.sides import Findings, Sides, figure, measure_of_both


@measure_of_both("masks")
def masks(sides: Sides) -> dict[ArmName, Findings]:
    """The mismatches that static checks count in the baseline, and in a wrong candidate.

    The candidate has the baseline's last package in place of its own.
    """
    findings: dict[ArmName, Findings] = {}
    baseline, candidate = sides.baseline.bundle, sides.candidate.bundle
    last = candidate.plan.shards[-1].name
    with tempfile.TemporaryDirectory(dir=sides.workload.setting.folder) as folder:
        mixed = Path(folder) / "mixed"
        shutil.copytree(candidate.path, mixed)
        remove(Bundle(mixed).shard(last))
        shutil.copytree(baseline.shard(last), Bundle(mixed).shard(last))
        bundles: dict[ArmName, Bundle] = {"baseline": baseline, "candidate": Bundle(mixed)}
        for name, bundle in bundles.items():
            wrong = static_checks(bundle)
            texts = {"masks": "; ".join(map(str, wrong[:3]))} if wrong else {}
            figures = {"mask_mismatches": figure("mask_mismatches", len(wrong))}
            findings[name] = Findings(figures, texts)
    return findings
