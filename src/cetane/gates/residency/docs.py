"""The page docs/reference/residency.md with all rules and sources, and one rule for a terminal."""

from cetane.gates.limits import limits
from cetane.gates.residency.rule import (
    GROUPS,
    Citation,
    Evidence,
    Rule,
    load_evidence,
    load_rules,
)
from cetane.templates import environment


def markdown() -> str:
    """The page. The same rules always give the same page."""
    filters = {"bullet": bullet, "summary": summary}
    template = environment("cetane.gates.residency", filters).get_template("residency.md.j2")
    return template.render(
        limits=limits().residency,
        evidence=load_evidence().values(),
        groups=GROUPS,
        rules=load_rules().values(),
    )


def summary(rule: Rule) -> str:
    """A rule's severity, placement, confidence, chips, system and framework, on one line."""
    facts = [rule.severity, f"placement {rule.placement or 'as it is'}"]
    facts.append(f"confidence {rule.confidence}")
    if rule.chips != ("*",):
        facts.append(f"chips {', '.join(rule.chips)}")
    if rule.min_os:
        facts.append(f"OS {rule.min_os:g} and later")
    if rule.before_os is not None:
        facts.append(f"before OS {rule.before_os:g}")
    if rule.drags:
        facts.append("neighbours go with it")
    return ", ".join([*facts, rule.framework])


def bullet(source: Citation) -> str:
    """A source as an item of a list."""
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
