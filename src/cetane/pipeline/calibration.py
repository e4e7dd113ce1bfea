"""The calibration of a model: how far its residual stream must be scaled to stay inside fp16.

One forward pass of the Hugging Face model over a text tells it. The store keeps the result, by the
checkpoint's content. If it forgets the result, another pass is made.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from cetane.checkpoint import Checkpoint
from cetane.compress.fitted import FittedConstants
from cetane.compress.second_order import MOST_BITS
from cetane.errors import CetaneError
from cetane.families import Truth, options_of
from cetane.files import Progress, json_sha256, read_json, silent, write_json
from cetane.fitting.fit import fit
from cetane.gates.probes import begun, english
from cetane.gates.reference import reference_of
from cetane.hardware import LARGEST_FP16
from cetane.planner import Planner
from cetane.planner.weights import format_of
from cetane.schema.changes import decided
from cetane.schema.recipe import Recipe
from cetane.store import cache_store
from cetane.validation import Data, validated

TEXT_TOKENS, RANDOM_TOKENS = 256, 128
"""Tokens of the pass. The text comes first, with the token that the tokenizer puts before a text:
first tokens have the largest residuals. Random tokens follow, since rare ones have large residuals
too."""
SAFE_RESIDUAL = LARGEST_FP16 / 4
"""The largest residual that is inside fp16 with a margin for other texts: a quarter of its end."""
SMALLEST_SCALE = 2.0**-12
"""The least scale of the residual stream. With less, the scaled weights lose bits of fp16."""
VERSION, FILE = 3, "calibration.json"
"""The file of a calibration. A new version is another key, so the pass is made anew."""
SCALE, METHOD = "family.residual_scale", "compression.method"
LEAST = 0.005
"""A smaller share of plainly rounded weights is not reported."""


class Calibration(Data):
    """Ranges of a model, in fp32 and in the model's own units."""

    residuals: dict[str, float]
    """The largest magnitude of the residual stream after a block, by the block's name."""

    @property
    def largest_residual(self) -> float:
        return max(self.residuals.values(), default=0.0)

    @property
    def residual_scale(self) -> float:
        """The largest power of two, 1 at most, that brings every residual inside fp16."""
        if (
            not SAFE_RESIDUAL < self.largest_residual < math.inf
        ):  # a build refuses what is not finite
            return 1.0
        return max(
            2.0 ** math.floor(math.log2(SAFE_RESIDUAL / self.largest_residual)), SMALLEST_SCALE
        )


def resolve_scale(checkpoint: Checkpoint, recipe: Recipe, progress: Progress = silent) -> Recipe:
    """The recipe with a scale of the residual stream that a calibration of the checkpoint finds.

    A scale of 1 is left out, since a recipe without the option means 1. A recipe that names a scale
    comes back as it is, without a pass.
    """
    options = options_of(checkpoint.config["model_type"], recipe.family)
    if getattr(options, "residual_scale", None) != "auto":
        return recipe
    measured = calibrate(checkpoint, recipe, progress)
    scale = measured.residual_scale
    family = {key: value for key, value in recipe.family.items() if key != "residual_scale"}
    plain = recipe.model_copy(update={"family": family})
    if scale == 1:
        return plain
    reason = (
        f"the residual stream reaches {measured.largest_residual:.0f}, "
        f"and fp16 ends at {LARGEST_FP16:.0f}"
    )
    return decided(plain, {SCALE: scale}, {SCALE: reason})


def resolve_fitted(checkpoint: Checkpoint, recipe: Recipe, progress: Progress = silent) -> Recipe:
    """The recipe with constants fitted to the model, where its method asks for them. CetaneError
    for a recipe that names constants of another model."""
    compression = recipe.compression
    if compression.fitted is not None:
        compression.fitted.read().check_model(checkpoint)
        return recipe
    if compression.method == "plain":
        return recipe
    planner = Planner(checkpoint, recipe)
    fitted = fit(checkpoint, planner, progress)
    made = recipe.model_copy(
        update={"compression": compression.model_copy(update={"fitted": fitted})}
    )
    said = rounded_plainly(planner, fitted.read())
    return made if said is None else decided(made, {}, {METHOD: said})


def rounded_plainly(planner: Planner, fitted: FittedConstants) -> str | None:
    """How much of a model is rounded to few bits without fitted constants, in words; None for
    nothing."""
    few, whole = Counter[str](), 0
    for block in planner.blocks:
        for _, weight in block.weights():
            whole += weight.elements if weight.kind else 0
            form = format_of(weight, planner.recipe.compression)
            if form.bits <= MOST_BITS and weight.matrix not in fitted:
                few[str(weight.kind)] += weight.elements
    share = few.total() / whole
    if share < LEAST:
        return None
    return f"{share:.0%} of the weights are rounded plainly: {', '.join(sorted(few))}"


def calibrate(checkpoint: Checkpoint, recipe: Recipe, progress: Progress = silent) -> Calibration:
    """The calibration of a checkpoint: the store's, or that of a pass now.

    Of the recipe, only the family's options count: they decide which blocks there are.
    """
    planner = Planner(checkpoint, recipe)
    blocks = {block.name: truths for block in planner.model.layers if (truths := block.residuals())}
    tokens = calibration_tokens(checkpoint, planner.model.max_context, planner.model.vocab)
    key = json_sha256(["calibration", VERSION, checkpoint.content, blocks, tokens])
    with cache_store.opened(key) as folder:
        known = None if folder is None else load_calibration(folder / FILE)
    if known is not None:
        return known
    progress("calibration", 0, 1)
    made = run_pass(checkpoint, blocks, tokens)
    progress("calibration", 1, 1)
    cache_store.keep(
        key, lambda folder: write_json(folder / FILE, made.model_dump()), measured=True
    )
    return made


def calibration_tokens(checkpoint: Checkpoint, context: int, vocab: int) -> list[int]:
    """The tokens of the pass: a text behind BOS, whose residual is often the largest, then random
    ids below `vocab`. At most `context` together."""
    text = begun(checkpoint.tokenizer, min(TEXT_TOKENS, context), english())
    room = min(RANDOM_TOKENS, context - len(text))
    drawn = np.random.default_rng(1).integers(0, vocab, room).tolist()
    return [*text, *drawn]


def run_pass(
    checkpoint: Checkpoint, blocks: Mapping[str, list[Truth]], tokens: list[int]
) -> Calibration:
    """One forward pass, up to the last block: nothing is asked of the logits."""
    wanted = [truth for truths in blocks.values() for truth in truths]
    streams = reference_of(checkpoint).tensors(tokens, wanted)
    residuals = {
        name: max(float(np.abs(streams[truth]).max()) for truth in truths)
        for name, truths in blocks.items()
    }
    return Calibration(residuals=residuals)


def load_calibration(path: Path) -> Calibration | None:
    """A calibration from its file; None if the file is missing or holds no calibration."""
    with suppress(CetaneError):
        return validated(Calibration, read_json(path), str(path))
    return None
