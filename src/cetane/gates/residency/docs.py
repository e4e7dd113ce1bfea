"""docs/residency.md: every rule and its sources, written from the data."""

from collections.abc import Iterator

from cetane.gates.limits import limits
from cetane.gates.residency.rule import (
    GROUPS,
    Evidence,
    Rule,
    Source,
    load_evidence,
    load_rules,
)

INTRODUCTION = """\
# Residency

`cetane audit PACKAGE|BUNDLE [--chip m4-max] [--os 26]` says where every op of every function would
run, without a Mac and without reading weights. This page is made from the rules:
`cetane audit --rules --markdown > docs/residency.md`.

## Placements

| placement | means |
| --- | --- |
| ANE | on the ANE: ops of this kind were seen there, and no rule speaks against it |
| CPU | not on the ANE, whichever other unit takes it |
| fails | the program does not compile, load or run |
| wrong | it runs, with wrong numbers |
| unknown | nobody has said; never counted as ANE |

An op gets the evidence for its kind, then the worst that any rule says about it; one op that fails
fails its whole function. Evidence is about fp16: an op on integers is unknown. Constants (`const`,
`constexpr_*`) are evaluated when a program is loaded, and not counted. Where an op leaves the ANE
for good (argmax, top-k, gather), unary and shape ops between it and the edge of the graph go with
it. A function of flexible shapes is audited at the shape it was made for, and at the others.

## Measuring

All of that is a prediction. On a Mac, `cetane audit PACKAGE|BUNDLE --measure` asks Core ML's
MLComputePlan about every function and writes `NAME.measured.json` beside it. Anywhere else,
`--measured FILE` takes that file: what was measured wins, prediction and measurement are shown
beside each other, and the file is kept with the package or in the bundle. It counts only for the
very program that was measured.

## Verdict
"""


def markdown() -> str:
    """The page."""
    return "\n".join([INTRODUCTION, *verdict(), *evidence(), *rules()]) + "\n"


def verdict() -> Iterator[str]:
    ask = limits().residency
    yield (
        f"Exit code 1, and FAIL, if a finding is {' or '.join(ask.severities)}, or if more "
        f"than {ask.weights_off_ane:.0%} of all weights\nare read by ops that are placed off "
        "the ANE; a finding that a Mac refuted does not count. Exit code\n2 for bad input.\n"
    )


def evidence() -> Iterator[str]:
    yield "## Evidence by kind of op\n"
    for known in load_evidence().values():
        yield f"### {known.id}\n"
        kinds = ", ".join(f"`{kind}`" for kind in known.kinds)
        yield f"{known.placement}, confidence {known.confidence}: {kinds}.\n"
        yield from map(bullet, known.sources)
        yield ""


def rules() -> Iterator[str]:
    for group in GROUPS:
        yield f"## Rules: {group}\n"
        for rule in load_rules().values():
            if rule.group == group:
                yield from page(rule)


def page(rule: Rule) -> Iterator[str]:
    yield f"### {rule.id}\n"
    yield f"{rule.title}: {rule.message}. **Fix:** {rule.fix}.\n"
    yield f"{summary(rule)}.\n"
    yield from map(bullet, rule.sources)
    yield ""


def summary(rule: Rule) -> str:
    """Severity, placement, confidence and scope."""
    facts = [rule.severity, f"placement {rule.placement or 'as it is'}"]
    facts.append(f"confidence {rule.confidence}")
    if rule.chips != ("*",):
        facts.append(f"chips {', '.join(rule.chips)}")
    if rule.min_os:
        facts.append(f"OS {rule.min_os:g} and later")
    if rule.drags:
        facts.append("neighbours go with it")
    return ", ".join([*facts, rule.framework])


def bullet(source: Source) -> str:
    against = "against: " if source.contradicts else ""
    return f"- {against}{source.claim} — {source.where}, {source.date}"


def explained(known: Rule | Evidence) -> str:
    """A rule or a piece of evidence as text for a terminal."""
    if isinstance(known, Rule):
        head = [f"{known.id}: {known.title}", summary(known), known.message, f"fix: {known.fix}"]
    else:
        head = [f"{known.id}: {', '.join(known.kinds)}",
                f"placement {known.placement}, confidence {known.confidence}"]  # fmt: skip
    return "\n".join([*head, *map(bullet, known.sources)])
