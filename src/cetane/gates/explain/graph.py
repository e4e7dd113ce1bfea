"""Explains wrong graphs: whether authoring, conversion or the contract of a cache is wrong."""

from collections.abc import Callable, Sequence

from cetane.checkpoint import Checkpoint
from cetane.gates.authored import Authored
from cetane.gates.explain.explanation import Cause, Explanation, RefusedPort
from cetane.gates.explain.mends import undone, written_by_host
from cetane.gates.golden_result import GoldenResult
from cetane.gates.probes import HostWay
from cetane.gates.readings import Misread, misread
from cetane.gates.reference import reference_of
from cetane.gates.structure import WAYS, Deviation
from cetane.planner import Planner
from cetane.schema.changes import override

DIFF = "Run cetane diff BUNDLE --model CHECKPOINT."
WITHOUT_DRAFTS = ", and run with --speculative none until then"
UNTIL_THEN: dict[HostWay, str] = {
    "rewind": ", and serve with --prefixes 0 until then",
    "draft": WITHOUT_DRAFTS,
    "tree": WITHOUT_DRAFTS,
    "last": "",
}
"""What to do about a fault of the host, beside a change of the recipe."""


def wrong_graph(
    port: RefusedPort, checkpoint: Checkpoint, verdict: GoldenResult, adapter: str | None
) -> Explanation:
    """The explanation of a wrong reading, or else of the first wrong tensor."""
    recipe, truth = port.plan.recipe, reference_of(checkpoint, adapter)
    authored = Authored(Planner(checkpoint, recipe).on(adapter), checkpoint, truth)
    if verdict.misread:
        return wrong_reading(verdict.misread[0], authored)
    plain = [one for one in verdict.structure if not one.way]
    first = first_off(plain) or first_off(verdict.structure)
    assert first is not None
    if first.way:
        return Explanation(
            cause="contract",
            where=place_of(first),
            sentence=f"{erring(first)}; a plain text is right, only {WAYS[first.way]} are wrong. "
            f"This is a fault of cetane: report it{UNTIL_THEN[first.way]}.",
            changes=written_by_host(recipe),
        )

    def right(modules: Authored) -> bool:
        return first_off(modules.deviations(port.tokenizer)) is None

    return wrong_tensor(first, verdict.structure, authored, right, DIFF)


def wrong_reading(read: Misread, authored: Authored) -> Explanation:
    """The explanation of a wrong reading: the cause is authoring if the torch modules have it, else
    conversion."""
    same = any(own.kind == read.kind for own in misread(authored, authored.reference))
    cause: Cause = "authoring" if same else "conversion"
    tail = "the authored modules have it too" if same else "conversion put it there"
    return Explanation(
        cause=cause,
        where=read.shard,
        sentence=f"{read.shard} is not the model's: {read.problem}; {tail}.",
    )


def wrong_tensor(
    first: Deviation,
    rows: Sequence[Deviation],
    authored: Authored,
    right: Callable[[Authored], bool],
    diff: str,
) -> Explanation:
    """The explanation of the first wrong tensor of some rows.

    If the torch modules are right, conversion is wrong: `diff` says how to find it. `right` judges
    modules as the port was judged.
    """
    recipe, modes = authored.planner.recipe, authored.planner.plan().modes
    what, where = erring(first), place_of(first)
    if right(authored):
        return Explanation(
            cause="conversion",
            where=where,
            sentence=f"{what}; the authored modules are right, so conversion changed the program. "
            f"{diff}",
        )
    off = sorted({one.mode for one in rows if off_limit(one)})
    if len(off) < len(modes) or right_with_host_caches(authored, right):
        return Explanation(
            cause="contract",
            where=where,
            sentence=f"{what}; a cache or a mask of {', '.join(off)} is wrong.",
            changes=written_by_host(recipe),
        )
    return Explanation(
        cause="authoring",
        where=where,
        sentence=f"{what}; the authored module is not the model.",
        changes=undone(recipe),
    )


def place_of(first: Deviation) -> str:
    """Where a wrong tensor is."""
    return f"{first.shard}, after {first.truth}"


def erring(first: Deviation) -> str:
    """By how much a tensor errs, and where, in words."""
    errs = "has infinity or NaN" if first.lost else f"errs by {first.relative:.2g}"
    return (
        f"On the checkpoint's own weights, {first.tensor} of {first.shard} {errs} after "
        f"{first.truth} ({first.told}, {first.probe}, position {first.position})"
    )


def first_off(rows: Sequence[Deviation]) -> Deviation | None:
    """The first tensor beyond its limit, in the order of the shards."""
    return next((one for one in rows if off_limit(one)), None)


def off_limit(one: Deviation) -> bool:
    """Whether a deviation is beyond its limit."""
    return one.relative > one.limit


def right_with_host_caches(authored: Authored, right: Callable[[Authored], bool]) -> bool:
    """Whether the torch modules are right with caches that the host writes."""
    recipe, weights = authored.planner.recipe, authored.weights
    changes = written_by_host(recipe)
    if not changes:
        return False
    planner = Planner(weights, override(recipe, changes)).on(authored.planner.adapter)
    return right(Authored(planner, weights, authored.reference))
