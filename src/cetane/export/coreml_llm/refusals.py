"""Plans that CoreML-LLM's runtime cannot load."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cetane.errors import CetaneError
from cetane.export.coreml_llm.contract import CHUNKS, SHARED, WIDTH
from cetane.export.refusals import (
    ANY_BUNDLE,
    refuse_capacities,
    refuse_int4_rows,
    refuse_int8_caches,
    refuse_streaming,
    refuse_wide_slices,
)

if TYPE_CHECKING:
    from cetane.export.coreml_llm.planner import ContractPlanner

OTHER_RECIPE = "port with one of the recipes gemma4-1chunk to gemma4-4chunk"


def second_layer(planner: ContractPlanner) -> int:
    """The first layer of the second package."""
    _, blocks, *_ = planner.members.values()
    return blocks[0].layer


def refuse(planner: ContractPlanner) -> None:
    """Raise CetaneError for a plan that their runtime cannot load."""
    recipe = planner.recipe
    if planner.checkpoint.config["model_type"] != "gemma4_text" or not planner.model.tables:
        raise CetaneError(
            "the layout coreml-llm is for Gemma 4 with per-layer embeddings",
            ANY_BUNDLE,
        )
    if not SHARED.keys() <= planner.memory.slots.keys():
        raise CetaneError(
            "CoreML-LLM's runtime needs sliding and full layers, this model has only "
            f"{', '.join(planner.memory.slots)} ones",
            ANY_BUNDLE,
        )
    refuse_capacities(recipe, "CoreML-LLM's runtime")
    refuse_int8_caches(recipe, "CoreML-LLM's runtime")
    refuse_int4_rows(recipe, "CoreML-LLM's runtime", "int8")
    refuse_streaming(recipe, "CoreML-LLM's runtime")
    refuse_packages(planner)
    refuse_caches(planner)
    refuse_output_head(planner)
    if recipe.embedding.inside:
        raise CetaneError(
            "CoreML-LLM's runtime looks tokens up itself", "port with --set embedding.inside=false"
        )
    if any(planner.group(name).dim > WIDTH for name in SHARED):
        raise CetaneError(
            f"CoreML-LLM's runtime has attention heads of at most {WIDTH} channels", ANY_BUNDLE
        )


def refuse_packages(planner: ContractPlanner) -> None:
    """Raise CetaneError for another number of packages, or another cut, than their runtime has."""
    layout = planner.recipe.layout
    apart = layout.kind != "single" and layout.head != "last"
    if len(planner.members) not in CHUNKS or apart:
        raise CetaneError(
            f"CoreML-LLM's runtime loads 1 to 4 packages, the last with the head, not "
            f"{len(planner.members)}{' with a head apart' if apart else ''}",
            OTHER_RECIPE,
        )
    if len(planner.members) == 2 and second_layer(planner) != planner.first_reader:
        raise CetaneError(
            f"CoreML-LLM's first merged package owns all caches: layers up to "
            f"{planner.first_reader}, but this layout is cut at {second_layer(planner)}",
            OTHER_RECIPE,
        )


def refuse_caches(planner: ContractPlanner) -> None:
    """Raise CetaneError for caches of another contract, layout or length than theirs."""
    layout = planner.recipe.tensor_layout
    for name, contract in (("full", "blend"), ("sliding", "shift")):
        if planner.memory.slots[name].contract != contract or layout != "c1t":
            raise CetaneError(
                f"CoreML-LLM's {name} layers have {contract} caches of layout c1t, this bundle's "
                f"{planner.memory.slots[name].contract} caches of layout {layout}",
                OTHER_RECIPE,
            )
    if not planner.memory.slots["sliding"].limited or planner.memory.slots["full"].limited:
        raise CetaneError(
            "CoreML-LLM's sliding layers keep a window, its full layers the context", OTHER_RECIPE
        )
    window, count = planner.group("sliding").window, planner.memory.slots["sliding"].count
    if window != count:
        raise CetaneError(
            f"CoreML-LLM's sliding caches hold the model's window of {window} tokens, but cetane's "
            f"hold {count}, a multiple of 32",
            ANY_BUNDLE,
        )


def refuse_output_head(planner: ContractPlanner) -> None:
    """Raise CetaneError for a head of some tokens only, or with slices that are too wide."""
    if planner.recipe.head.subset is not None:
        raise CetaneError(
            "CoreML-LLM's runtime needs a head with all tokens", "port without head.subset"
        )
    *_, last = planner.members
    rows = max(head.stop - head.start for head in planner.heads_of(last))
    refuse_wide_slices(rows, planner.model.vocab)
