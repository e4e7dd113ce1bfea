"""Whether a bundle's manifest has the plan and the tags that its recipe makes."""

from collections.abc import Mapping

from cetane.gates.verdict import Check, at_most
from cetane.schema.plan import Plan

OTHER_PLAN = "structure: parts of the plan that differ from the recipe's"
OTHER_TAGS = "structure: tags that differ from the recipe's"


def other_parts(plan: Plan, wanted: Plan) -> list[str]:
    """The fields of a bundle's plan that are not as its recipe makes them."""
    return [name for name in Plan.model_fields if getattr(plan, name) != getattr(wanted, name)]


def same_plan(plan: Plan, wanted: Plan) -> Check:
    """Whether a plan is the one that its recipe makes.

    Probes cannot show this. A route knows an expert by its place alone, and perhaps no token of a
    probe chooses a rare expert. No probe depends on sizes in bytes, which cards and reports
    print."""
    return at_most(OTHER_PLAN, float(len(other_parts(plan, wanted))), 0)


def same_tags(found: Mapping[str, str], wanted: Mapping[str, str]) -> Check:
    """Whether a manifest's tags are those that its recipe makes; no tags at all say nothing
    wrong."""
    others = set(found.items()) ^ set(wanted.items()) if found else ()
    return at_most(OTHER_TAGS, float(len({name for name, _ in others})), 0)
