"""Recipes and bundles that another runtime cannot run: each refusal says what to do instead."""

from cetane.bundle import Bundle
from cetane.compress.fitted import by_content
from cetane.errors import CetaneError
from cetane.families import Model
from cetane.schema.interface import Mask
from cetane.schema.recipe import Recipe

MOST_ROWS = 1 << 16
"""The most rows of a head's part or slice: on the ANE, an argmax over more is wrong."""
ANY_BUNDLE = "the layout contract describes any bundle"
"""The hint of a refusal that no other recipe avoids."""


def refuse_capacities(recipe: Recipe, what: str) -> None:
    """Raise CetaneError for a recipe with several capacities: the caches of `what` never grow."""
    if recipe.cache.capacities:
        raise CetaneError(
            f"{what} has caches of one length, but recipe {recipe.name} has the capacities "
            f"{', '.join(map(str, recipe.cache.capacities))} and {recipe.cache.context}",
            "port with --set 'cache.capacities=[]'",
        )


def refuse_distances(model: Model, what: str) -> None:
    """Raise CetaneError for masks that hold distances: those of `what` only hide keys."""
    if any(isinstance(source, Mask) and source.distances for source in model.host.values()):
        raise CetaneError(f"{what} makes masks without distances (ALiBi)", ANY_BUNDLE)


def refuse_streaming(recipe: Recipe, what: str) -> None:
    """Raise CetaneError for a recipe whose heads stream: `what` has one cache for a layer."""
    if recipe.cache.streaming is not None:
        raise CetaneError(
            f"{what} has one cache for a layer, but heads of recipe {recipe.name} stream",
            "port without cache.streaming",
        )


def refuse_wide_slices(rows: int, vocab: int) -> None:
    """Raise CetaneError for a head whose widest slice has `rows`: CoreML-LLM chooses in each."""
    if rows > MOST_ROWS:
        raise CetaneError(
            "CoreML-LLM's last package chooses a token in each slice of the head. On the ANE an "
            f"argmax over more than {MOST_ROWS:,} rows is wrong; a slice here has {rows:,}",
            f"port with --set head.slices={-(-vocab // MOST_ROWS)}",
        )


def refuse_int8_caches(recipe: Recipe, what: str) -> None:
    """Raise CetaneError for a recipe whose caches are int8: `what` keeps fp16."""
    if recipe.cache.format != "fp16":
        raise CetaneError(
            f"{what} takes keys and values in fp16, but the caches of recipe {recipe.name} are "
            f"{recipe.cache.format}",
            "port with --set cache.format=fp16",
        )


def refuse_int4_rows(recipe: Recipe, what: str, kept: str) -> None:
    """Raise CetaneError for a recipe with rows of four bits: the rows of `what` are `kept`."""
    if recipe.embedding.rows == "int4":
        raise CetaneError(
            f"{what} keeps rows of the embedding in {kept}, but those of recipe {recipe.name} are "
            "int4",
            f"port with --set embedding.format={kept.partition(' ')[0]}",
        )


def refuse_lost_constants(bundle: Bundle) -> None:
    """Raise CetaneError for a bundle whose fitted constants this machine does not have. An export
    encodes the checkpoint's weights once more, and the bundle has only their packed form."""
    fitted = bundle.plan.recipe.compression.fitted
    if fitted is None:
        return
    try:
        fitted.read()
    except CetaneError as error:
        place = by_content(fitted.sha256).path
        raise CetaneError(
            f"{bundle.path} has fitted constants, and this layout needs their file. It cannot be "
            f"read: {place}",
            "export on the machine that ported it; --layout contract and onnx need no such file; "
            "or port into another folder, with a copy of the bundle's recipe.toml without "
            "[compression.fitted]",
        ) from error


def refuse_int8_activations(bundle: Bundle) -> None:
    """Raise CetaneError for a bundle with 8-bit activations: an export lowers its checkpoint once
    more, but only the bundle's packages hold the calibration."""
    if bundle.int8_activations:
        raise CetaneError(
            f"another runtime has activations in fp16, but those of {bundle.path} are quantized",
            "export the bundle that quantize-activations was given",
        )


def refuse_draft_heads(bundle: Bundle) -> None:
    """Raise CetaneError for a bundle with draft heads, which another runtime would not use."""
    for kind, head in bundle.draft_heads().items():
        raise CetaneError(
            f"{bundle.path} has the draft head {kind}, which another runtime cannot run",
            f"move {head.path} away for the export; --layout contract and onnx take it along",
        )
