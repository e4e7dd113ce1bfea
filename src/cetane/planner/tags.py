"""Tags of a bundle's attention, for its manifest, in the words of the published ports' manifests.

ane-book's `attn_implementation` is one, as
"cca_gqa_stateful_kvcache_rope_partial_qk_fp16_v_o_int8".
"""

from collections.abc import Iterator

from cetane.families import CacheGroup
from cetane.planner.planner import Planner
from cetane.planner.weights import format_of

PROJECTIONS = {"q": ".q_proj.", "k": ".k_proj.", "v": ".v_proj", "o": ".o_proj."}
"""By letter, the part of a canonical name that identifies one of attention's matrices."""
CONVOLUTION = "conv_qk_grouped.weight"


def tags(planner: Planner) -> dict[str, str]:
    """The tag `attn_implementation`; for a ZAYA also `cca`: whole, current-tap (no history) or
    none."""
    made = {"attn_implementation": "_".join(attention_words(planner))}
    if planner.checkpoint.config["model_type"] == "zaya":
        made["cca"] = cca(planner)
    return made


def attention_words(planner: Planner) -> Iterator[str]:
    """The words of `attn_implementation`."""
    model, recipe = planner.model, planner.recipe
    kept = {name for block in model.layers for name in block.keeps}
    groups = [g for n, g in model.memory.items() if isinstance(g, CacheGroup) and n in kept]
    if cca(planner) != "none":
        yield "cca"
    if groups:
        yield "gqa" if any(group.query > group.heads for group in groups) else "mha"
        yield f"{recipe.cache.contract.partition('-')[0]}_kvcache"
        part = any(table.width < group.dim for table in model.rotary.values() for group in groups)
        yield "rope_partial" if part else "rope"
    else:
        yield "q_to_o"
    yield from format_words(planner)
    if "skip-large-bias" in recipe.family.get("departures", ()):
        yield "cond_skip"


def format_words(planner: Planner) -> Iterator[str]:
    """The formats of queries, keys, values and outputs: `qk_fp16`, `vo_int8`."""
    rules, letters = planner.recipe.compression, dict[str, str]()
    for block in planner.model.layers:
        for _, weight in block.weights():
            for letter, part in PROJECTIONS.items():
                if weight.kind == "attention" and part in weight.name:
                    form = format_of(weight, rules).name.partition("-")[0]
                    letters.setdefault(letter, form)
    for form in dict.fromkeys(letters.values()):
        yield f"{''.join(n for n in PROJECTIONS if letters.get(n) == form)}_{form}"


def cca(planner: Planner) -> str:
    """The tag `cca`, from the convolutions of all layers, since some layers may be skipped."""
    taps = {
        weight.elements < weight.stored[0] * weight.stored[1] * weight.stored[2]
        for block in planner.model.layers
        for _, weight in block.weights()
        if weight.name.endswith(CONVOLUTION)
    }
    if not taps:
        return "none"
    return "current-tap" if True in taps else "whole"
