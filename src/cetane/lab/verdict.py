"""Verdicts: decisions about experiments, each with a number in its reason."""

import re

from cetane.errors import CetaneError
from cetane.lab.experiment import BURIED, Experiment, Status
from cetane.lab.journal import Run, Verdict, now


def decide(
    experiment: Experiment,
    runs: list[Run],
    status: Status,
    reason: str,
    obituary: str,
    lab: str = "",
) -> Verdict:
    """A verdict for the journal. `lab` is the option by which commands find the lab, after a space.

    Raises CetaneError for a reason without a number, and for Shelved or Rejected without an
    obituary. Without a finished run of the present definition, only Planned is allowed.
    """
    if not re.search(r"\d", reason):
        raise CetaneError(
            "a verdict needs a reason with a number",
            f"cetane lab show {experiment.id}{lab} has some",
        )
    if status in BURIED and not obituary.strip():
        raise CetaneError(
            f"{status} needs an obituary, so that it is not built again", "add --obituary TEXT"
        )
    judged = any(run.status in ("passed", "failed") and run.fits(experiment) for run in runs)
    if status != "Planned" and not judged:
        raise CetaneError(
            f"{experiment.id}, as it is now, was never run to its end",
            f"cetane lab run {experiment.id}{lab}",
        )
    return Verdict(
        experiment=experiment.id, at=now(), status=status, reason=reason, obituary=obituary
    )
