"""Changes of a recipe that mend a refused port, as values by dotted key."""

from collections.abc import Iterator
from typing import Any

from cetane.compress import parse_format
from cetane.gates.residency.rule import load_rules
from cetane.planner import Planner
from cetane.planner.weights import format_of
from cetane.schema.changes import value_of
from cetane.schema.plan import Plan
from cetane.schema.recipe import Quality, Recipe

BETTER = {
    4: "palette6-kmeans-group32",
    6: "int8-per-channel",
    8: "fp16",
}
"""Better formats, by the most bits of a format that loses too much."""
ROW_BITS = 4
"""The bits of int4 rows. Weights of no more bits lose more than such rows."""


def undone(recipe: Recipe) -> dict[str, Any]:
    """The change that undoes a recipe's own departure from the model; empty if it has none."""
    if recipe.family.get("departures"):
        return {"family.departures": []}
    if recipe.family.get("full_window"):
        return {"family.full_window": recipe.cache.context}
    return {}


def written_by_host(recipe: Recipe) -> dict[str, Any]:
    """The changes that make all caches of a recipe the simplest kind: the host writes them."""
    changes = {
        "cache.contract": "readonly", "cache.padded": False, "cache.state_heads": 1,
        "cache.sliding": recipe.cache.sliding and "readonly",
    }  # fmt: skip
    return {key: value for key, value in changes.items() if value_of(recipe, key) != value}


def better_weights(planner: Planner) -> tuple[str, dict[str, Any]]:
    """The format of a recipe that loses most, and the change to the next better one; if there is
    none, to a weaker quality."""
    recipe = planner.recipe
    key, form = fewest_bits(recipe)
    better = better_format(form, planner)
    if recipe.embedding.rows == "int4" and parse_format(form).bits > ROW_BITS:
        key, form, better = "embedding.format", "int4 rows", "int8"
    return form, {key: better} if better else dict(weaker(recipe.quality))


def fewest_bits(recipe: Recipe) -> tuple[str, str]:
    """The key of a recipe whose weights have the fewest bits, and their format."""
    rules = recipe.compression
    formats = {
        "compression.default": rules.default,
        **{f"compression.types.{kind}": form for kind, form in rules.types.items()},
        **{f'compression.names."{name}"': form for name, form in rules.names.items()},
    }
    return min(formats.items(), key=lambda item: parse_format(item[1]).bits)


def better_format(form: str, planner: Planner) -> str | None:
    """The next better format that all weights in a format can have; None if there is none."""
    bits, compression = parse_format(form).bits, planner.recipe.compression
    weights = [
        weight for block in planner.blocks for _, weight in block.weights()
        if format_of(weight, compression).name == form
    ]  # fmt: skip
    return next(
        (other for most, other in BETTER.items()
         if bits <= most and all(parse_format(other).fits(one.shape) for one in weights)), None,
    )  # fmt: skip


def weaker(quality: Quality) -> Iterator[tuple[str, Quality]]:
    """The change to the next weaker quality; none for the weakest."""
    order: tuple[Quality, ...] = ("near-lossless", "good", "usable")
    for other in order[order.index(quality) + 1 :][:1]:
        yield "quality", other


def change_of(rule: str, plan: Plan) -> dict[str, Any]:
    """The change of a plan's recipe that a rule of residency asks for, where there is one."""
    known, recipe = load_rules().get(rule), plan.recipe
    changes = {} if known is None else dict(known.changes)
    if changes.get("layout.chunks") == "more":
        layout = recipe.layout
        if layout.kind not in ("chunks", "single") or layout.cuts:
            return {}
        chunks = sum(shard.kind != "head" for shard in plan.shards)
        more = min(2 * chunks, plan.layers)
        if more <= chunks:
            return {}
        changes |= {"layout.kind": "chunks", "layout.chunks": more}
    if changes.get("cache.contract") == "readonly":
        return written_by_host(recipe)
    return {key: value for key, value in changes.items() if value_of(recipe, key) != value}
