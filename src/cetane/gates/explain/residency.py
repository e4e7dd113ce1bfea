"""Explains an audit that refuses programs."""

from cetane.gates.explain.explanation import Explanation
from cetane.gates.explain.mends import change_of
from cetane.gates.limits import limits
from cetane.gates.residency.audit import Audit
from cetane.schema.plan import Plan


def explain_residency(audited: Audit, plan: Plan) -> Explanation:
    """Why a refused audit's programs would not run on the ANE: the first finding that refuses them,
    and its mend."""
    severe = limits().residency.severities
    findings = [
        (f"{one.package}/{one.function}", finding)
        for one in audited.functions
        for finding in one.findings
    ]
    findings += [("the bundle", finding) for finding in audited.findings]
    worst = [item for item in findings if item[1].severity in severe]
    off = [item for item in findings if item[1].placement in ("CPU", "fails", "wrong")]
    said = f"On {audited.target}, predicted: {audited.reasons[0]}"
    if not (worst or off):
        return Explanation(cause="residency", where="the bundle", sentence=f"{said}.")
    where, first = (worst or off)[0]
    return Explanation(
        cause="residency",
        where=where,
        sentence=f"{said}; in {where}, {first.rule}: {first.message}. To mend: {first.fix}.",
        changes=change_of(first.rule, plan),
    )
