"""Rules against measurements: those that were wrong on a Mac, by how much, and what to narrow."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from cetane.gates.residency.audit import Audit, FunctionAudit, Placed
from cetane.gates.residency.rule import Confidence, Placement
from cetane.validation import Data

Audited = tuple[FunctionAudit, Placed]
"""An op behind the audit of its function."""
TRAITS: dict[str, Callable[[Audited], str]] = {
    "kind": lambda seen: seen[1].kind,
    "T": lambda seen: str(seen[0].tokens),
    "package": lambda seen: seen[0].package,
}
"""The traits of an op by which a rule may be narrowed."""


class Refuted(Data):
    """A rule, or evidence, whose prediction was wrong for some ops."""

    rule: str
    predicted: Placement
    confidence: Confidence
    ops: int
    """Ops that it placed and a Mac measured."""
    wrong: int
    """Those of these ops that were elsewhere."""
    measured: dict[Placement, int]
    """The number of wrong ops by their measured place."""
    narrow: str
    """A proposal that narrows the rule: what tells the wrong ops from the right ones."""


def refuted(audit: Audit) -> list[Refuted]:
    """The rules that were wrong, the most wrong first. Unknown placements refute nothing."""
    by_rule: dict[tuple[str, Placement], list[Audited]] = {}
    for function in audit.functions:
        for op in function.ops:
            if op.measured is not None and op.placement != "unknown":
                by_rule.setdefault((op.rule, op.placement), []).append((function, op))
    made = [one for key, ops in by_rule.items() for one in compared(*key, ops)]
    return sorted(made, key=lambda one: -one.wrong)


def compared(rule: str, predicted: Placement, ops: Sequence[Audited]) -> Iterator[Refuted]:
    """The rule, if it was wrong. Ops that it placed as `wrong` must be measured on the ANE."""
    place = "ANE" if predicted == "wrong" else predicted
    wrong = [seen for seen in ops if seen[1].measured != place]
    if wrong:
        right = [seen for seen in ops if seen[1].measured == place]
        yield Refuted(
            rule=rule,
            predicted=predicted,
            confidence=ops[0][1].confidence,
            ops=len(ops),
            wrong=len(wrong),
            measured=dict(Counter(op.measured for _, op in wrong if op.measured is not None)),
            narrow=narrowing(wrong, right),
        )


def narrowing(wrong: Sequence[Audited], right: Sequence[Audited]) -> str:
    """The trait that separates wrong from right, in words."""
    if not right:
        return "it held for no op here: limit its chips or systems, or withdraw it"
    for name, trait in TRAITS.items():
        off, on = {trait(seen) for seen in wrong}, {trait(seen) for seen in right}
        if not off & on and len(on) < len(off):
            return f"it held only for {name} {', '.join(sorted(on))}"
        if not off & on:
            return f"all but {name} {', '.join(sorted(off))}"
    return "no kind, width or package alone separates the ops for which it held"
