"""Models and recipes that ANEMLL's hosts cannot run."""

from cetane.errors import CetaneError
from cetane.export.anemll.contract import BATCH, FolderSizes
from cetane.export.refusals import (
    ANY_BUNDLE,
    refuse_capacities,
    refuse_distances,
    refuse_int4_rows,
    refuse_int8_caches,
    refuse_streaming,
)
from cetane.families import RoutedBlock, parse_config
from cetane.planner import Planner
from cetane.schema.interface import Mask
from cetane.schema.recipe import Recipe

WITHIN_WINDOW = "port with a context of at most the window: --context"


def refuse(planner: Planner, recipe: Recipe) -> None:
    """Raise CetaneError for a model, or a choice of the recipe, that their hosts cannot run."""
    model, kind = planner.model, planner.checkpoint.config["model_type"]
    if model.tables or model.shared or len(model.memory) != len(planner.memory.groups):
        raise CetaneError(f"ANEMLL's hosts keep only keys and values, so no {kind}", ANY_BUNDLE)
    if any(isinstance(block, RoutedBlock) for block in model.layers):
        raise CetaneError(f"ANEMLL's packages have no experts, so no {kind}", ANY_BUNDLE)
    refuse_distances(model, "ANEMLL's runtime")
    for source in model.host.values():
        if not isinstance(source, Mask):
            continue
        group = planner.memory.groups[source.group]
        windowed = source.window is not None and source.window < recipe.cache.context
        if (windowed and group.window is None) or source.sinks:
            raise CetaneError(
                f"layers of {kind} that see only {source.window} tokens share a cache with others",
                WITHIN_WINDOW,
            )
    windows = (group.window for group in planner.memory.groups.values())
    limited = {window for window in windows if window and window < recipe.cache.context}
    own = getattr(parse_config(planner.checkpoint.config), "sliding_window", None)
    if limited - {own}:
        raise CetaneError(
            f"ANEMLL's hosts know one window, the model's own of {own} tokens, but layers see "
            f"{' and '.join(map(str, sorted(limited)))}",
            "port without family.full_window",
        )
    refuse_capacities(recipe, "ANEMLL's runtime")
    refuse_int8_caches(recipe, "ANEMLL's runtime")
    refuse_int4_rows(recipe, "ANEMLL's runtime", "fp16")
    refuse_streaming(recipe, "ANEMLL's runtime")
    if recipe.head.subset is not None:
        raise CetaneError("ANEMLL's hosts need a head with all tokens", "port without head.subset")


def check_batch(sizes: FolderSizes) -> None:
    """Raise CetaneError for a batch with which ANEMLL's hosts cannot prefill."""
    if 3 * sizes.batch > sizes.context:
        raise CetaneError(
            f"a context of {sizes.context} tokens holds fewer than 3 whole batches of "
            f"{sizes.batch}",
            other_batch(sizes),
        )
    if sizes.window and sizes.window % sizes.batch:
        raise CetaneError(
            f"a batch of {sizes.batch} tokens does not divide the window of {sizes.window}",
            other_batch(sizes),
        )


def other_batch(sizes: FolderSizes) -> str:
    """The advice for a batch that does not fit: the largest that does, up to their default."""
    for batch in (BATCH >> shift for shift in range(BATCH.bit_length() - 1)):
        if 3 * batch <= sizes.context and not (sizes.window and sizes.window % batch):
            return f"port with another tokens.prefill: --set tokens.prefill={batch}"
    return WITHIN_WINDOW
