"""What one forward pass of the Hugging Face model over a text tells, collected once.

Later steps choose by it: how far the residual stream must be scaled to stay inside fp16, which
channels of a projection's input count. The result is kept in the store, by the checkpoint's
content; forgetting it only costs another pass.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch import Tensor, nn

from cetane.checkpoint import Checkpoint, streamed_part
from cetane.compress import Sensitivities
from cetane.families import Truth, options_of
from cetane.files import Progress, json_sha256, silent
from cetane.fitting.fit import fit
from cetane.gates.reference import Reference, reference_of
from cetane.planner import Planner
from cetane.schema.recipe import Recipe, decided
from cetane.store import kept as store

if TYPE_CHECKING:
    from cetane.compress.sensitivity import Vector

TEXT_TOKENS, RANDOM_TOKENS = 256, 128
"""A text as the tokenizer begins it, since first tokens have the largest residuals; then tokens
that no text has together, since rare ones have large residuals too."""
SAFE_RESIDUAL = 65504 / 4
"""The largest residual that is inside fp16 with a margin for other texts: a quarter of its end."""
SMALLEST_SCALE = 2.0**-12
"""Of the residual stream; below it, weights that are scaled with it lose bits of fp16."""
VERSION, FILE = 1, "calibration.safetensors"
"""Of the file: another version is made anew."""
SCALE = "family.residual_scale"
SQUARES, LARGEST = "squares/", "largest/"
"""Names of tensors in the file begin so."""


@dataclass(frozen=True)
class Calibration:
    """Ranges and second moments of a model, in fp32 and in the model's own units."""

    residuals: Mapping[str, float]
    """The largest magnitude of the residual stream after a block, by the block's name."""
    inputs: Sensitivities
    """Mean squares of the text's inputs `(I,)` of every projection, by its weight's name."""
    largest: Mapping[str, Vector]
    """Largest magnitudes of those inputs `(I,)`, over all tokens."""

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
    """The recipe with the residual stream's scale that a calibration of the checkpoint finds.

    Where that is what a recipe without the option means, the option is left out. A recipe that
    names a scale comes back as it is, without a pass.
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
    reason = f"the residual stream reaches {measured.largest_residual:.0f}, and fp16 ends at 65504"
    return decided(plain, {SCALE: scale}, {SCALE: reason})


def resolve_fitted(checkpoint: Checkpoint, recipe: Recipe, progress: Progress = silent) -> Recipe:
    """The recipe with constants fitted to the model, where its method asks for them."""
    compression = recipe.compression
    if compression.method == "plain" or compression.fitted is not None:
        return recipe
    fitted = fit(checkpoint, Planner(checkpoint, recipe), progress)
    return recipe.model_copy(
        update={"compression": compression.model_copy(update={"fitted": fitted})}
    )


def calibrate(checkpoint: Checkpoint, recipe: Recipe, progress: Progress = silent) -> Calibration:
    """The calibration of a checkpoint, from the store where it is there already.

    The recipe's family options decide which blocks there are, and nothing else.
    """
    planner = Planner(checkpoint, recipe)
    blocks = {
        block.name: truth
        for block in planner.model.layers
        if (truth := block.truths().get("hidden"))
    }
    tokens, text = calibration_tokens(checkpoint, planner.model.max_context, planner.model.vocab)
    key = json_sha256(["calibration", VERSION, checkpoint.content, blocks, tokens, text])
    with store.opened(key) as folder:
        known = None if folder is None else load_calibration(folder / FILE)
    if known is not None:
        return known
    progress("calibration", 0, 1)
    made = run_pass(checkpoint, blocks, tokens, text)
    progress("calibration", 1, 1)
    store.keep(key, lambda folder: save_calibration(made, folder / FILE))
    return made


def calibration_tokens(checkpoint: Checkpoint, context: int, vocab: int) -> tuple[list[int], int]:
    """The tokens of the pass, and how many of them are text."""
    content = (resources.files("cetane") / "data" / "texts" / "english.txt").read_text("utf-8")
    text = checkpoint.tokenizer.encode(content)[: min(TEXT_TOKENS, context)]
    room = min(RANDOM_TOKENS, context - len(text))
    drawn = np.random.default_rng(1).integers(0, vocab, room).tolist()
    return [*text, *drawn], len(text)


class InputStatistics:
    """Keeps statistics of what every linear layer of a module is given."""

    def __init__(self, text: int) -> None:
        """`text` tokens at the beginning count in the squares."""
        self.text = text
        self.squares: dict[str, Vector] = {}
        self.largest: dict[str, Vector] = {}

    def note(self, name: str, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Count an input `(1, n, I)`."""
        rows = inputs[0].detach().reshape(-1, inputs[0].shape[-1])
        self.squares[name] = rows[: self.text].double().square().mean(0).float().numpy()
        self.largest[name] = rows.abs().amax(0).float().numpy()

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """InputStatistics a model's linear layers for a time."""
        hooks = [
            module.register_forward_pre_hook(partial(self.note, f"{path}.weight"))
            for path, module in model.named_modules()
            if isinstance(module, nn.Linear)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def run_pass(
    checkpoint: Checkpoint, blocks: Mapping[str, Truth], tokens: list[int], text: int
) -> Calibration:
    """One forward pass, up to the last block: nothing is asked of the logits."""
    in_order = streamed_part(checkpoint) is not None  # inputs are of channels in its order
    reference = Reference(checkpoint, own=True) if in_order else reference_of(checkpoint)
    watch = InputStatistics(text)
    with watch.on(reference.model):
        streams = reference.tensors(tokens, list(blocks.values()))
    residuals = {name: float(np.abs(streams[truth]).max()) for name, truth in blocks.items()}
    return Calibration(residuals, Sensitivities(watch.squares), watch.largest)


def save_calibration(calibration: Calibration, path: Path) -> None:
    """Write a safetensors file: vectors, and the residuals as metadata."""
    tensors = {f"{SQUARES}{n}": vector for n, vector in calibration.inputs.inputs.items()}
    tensors |= {f"{LARGEST}{n}": vector for n, vector in calibration.largest.items()}
    content = save(tensors, {"residuals": json.dumps(dict(calibration.residuals))})
    path.write_bytes(content)  # save_file's would be for its writer's eyes only


def load_calibration(path: Path) -> Calibration | None:
    """A calibration from its file; None where there is none, or something else."""
    parts: dict[str, dict[str, Vector]] = {SQUARES: {}, LARGEST: {}}
    try:
        with safe_open(path, "np") as file:
            residuals: Any = json.loads((file.metadata() or {})["residuals"])
            for name in file.keys():  # noqa: SIM118, no mapping
                kind, _, weight = name.partition("/")
                parts[f"{kind}/"][weight] = file.get_tensor(name)
        ranges = {str(block): float(value) for block, value in residuals.items()}
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, AttributeError):
        return None
    return Calibration(ranges, Sensitivities(parts[SQUARES]), parts[LARGEST])
