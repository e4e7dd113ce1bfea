"""SmoothQuant: moves the outliers of channels from activations into weights, exactly.

An int8 tensor has one scale, so its largest channel decides how coarse all others are. Where a
linear op writes channel j and a projection reads it, a factor s_j can move between the two. The
writer's weights are divided by it, and the reader's multiplied by it:
s_j = max|X_j|^alpha / max|W_j|^(1 - alpha) (Xiao et al., arXiv 2211.10438, eq. 4). A family names
these places in `Block.exchanges`.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from cetane.activations.samples import filled
from cetane.checkpoint import Checkpoint
from cetane.checkpoint.stored_tensors import Identity
from cetane.checkpoint.wrapped import WrappedCheckpoint
from cetane.engine.authored import AuthoredBackend, host_tables
from cetane.engine.engine import Engine
from cetane.errors import CetaneError
from cetane.families import Block, Exchange, Weights
from cetane.planner import Planner
from cetane.schema.plan import Plan

ALPHA = 0.5
"""The share of the difficulty that weights take over: the paper's value for most models."""
SMALLEST = 1e-5
"""The least maximum of a channel: an unused channel gets no infinite factor."""

Factors = dict[str, tuple[int, Tensor]]
"""The axis to multiply along and its factors, by the name of a checkpoint's tensor."""


class Smoothed(WrappedCheckpoint):
    """A checkpoint whose tensors are multiplied by factors, in fp32. The model stays the same."""

    def __init__(self, base: Checkpoint) -> None:
        super().__init__(base)
        self.factors: list[Factors] = []

    def read(self, name: str) -> Tensor:
        tensor = self.base.read(name)
        for factors in self.factors:
            if name in factors:
                axis, factor = factors[name]
                tensor = tensor.float() * factor.reshape(-1, *[1] * (tensor.dim() - 1 - axis))
        return tensor

    def _read_rows(self, name: str, start: int, stop: int) -> Tensor:
        if any(name in factors for factors in self.factors):
            return self.read(name)[start:stop].clone()
        return self.base.read_rows(name, start, stop)

    def identified(self, identity: Identity) -> str:
        digest = hashlib.sha256(self.base.identified(identity).encode())
        for factors in self.factors:
            for name, (_, factor) in factors.items():
                digest.update(name.encode() + factor.numpy().tobytes())
        return digest.hexdigest()


def smoothing_planner(checkpoint: Checkpoint, plan: Plan, path: Path) -> Planner:
    """The planner of a bundle at `path`, whose `plan` and checkpoint can be smoothed.

    Raises CetaneError for turned channels, heads that stream and adapters, which take the channels
    as they were, and for a model with a layer that offers no exchanges.
    """
    recipe = plan.recipe
    for wrong, what, hint in (
        (recipe.compression.rotate, "turned channels", "compression.rotate = false"),
        (recipe.cache.streaming is not None, "heads that stream", "no cache.streaming"),
        (bool(plan.adapters or checkpoint.adapters), "adapters", "one merged by --lora"),
    ):
        if wrong:
            raise CetaneError(
                f"{path} has {what}, which smoothing does not know",
                f"quantize it without smoothing, or port it with {hint}",
            )
    planner = Planner(checkpoint, recipe)
    lacking = [block.name for block in planner.model.layers if not block.exchanges()]
    if lacking:
        raise CetaneError(
            f"{checkpoint.source}: smoothing finds nothing to exchange in {lacking[0]} of a "
            f"{checkpoint.config['model_type']}",
            "quantize without smoothing",
        )
    return planner


def smooth(checkpoint: Checkpoint, planner: Planner, texts: Sequence[Sequence[int]]) -> Smoothed:
    """The checkpoint with factors from the largest activations of some texts, in fp32. `planner` is
    that of `smoothing_planner`."""
    largest = largest_activations(checkpoint, planner, texts)
    result = Smoothed(checkpoint)
    for block in planner.model.layers:
        for place in block.exchanges():
            seen = largest[block.prefix + place.readers[0]]
            result.factors.append(factors_of(result, block, place, seen))
    return result


def largest_activations(
    checkpoint: Checkpoint, planner: Planner, texts: Sequence[Sequence[int]]
) -> dict[str, Tensor]:
    """The largest magnitude of every channel that an exchange reads, by its first reader's path."""
    engine = Engine(
        planner.plan(), AuthoredBackend(planner, checkpoint), host_tables(planner, checkpoint)
    )
    largest: dict[str, Tensor] = {}
    with ExitStack() as stack:
        for block in planner.model.layers:
            for place in block.exchanges():
                stack.enter_context(watched(block, place.readers[0], largest))
        engine.run([filled(engine.session(), text) for text in texts])
    return largest


@contextmanager
def watched(block: Block, path: str, largest: dict[str, Tensor]) -> Iterator[None]:
    """A context that notes the largest magnitude of each input channel of a projection."""

    def note(_: object, inputs: tuple[Tensor, ...]) -> None:
        seen = inputs[0].abs().flatten(2).amax(2)[0]
        name = block.prefix + path
        largest[name] = torch.maximum(largest[name], seen) if name in largest else seen

    hook = block.get_submodule(path).register_forward_pre_hook(note)
    try:
        yield
    finally:
        hook.remove()


def factors_of(weights: Weights, block: Block, place: Exchange, largest: Tensor) -> Factors:
    """The factors of an exchange's tensors. `largest` is the magnitude of each channel that its
    readers get.

    Parameters may be rows of one tensor, as Phi-3's and GPT-NeoX's. Then all readers of a tensor
    read one input.
    """
    # Both parts of a projection that is cut in two are columns of the same tensor.
    stored = {path.replace(".first", ".weight"): weight for path, weight in block.weights()}
    names = list(dict.fromkeys(stored[f"{reader}.weight"].name for reader in place.readers))
    columns = torch.stack([weights.read(n).float().abs().amax(0) for n in names]).amax(0)
    # A channel that a key/value head writes once is read by all its query heads, the middle axis.
    activation, weight = (
        values.reshape(place.channels).amax(1).clamp(min=SMALLEST) for values in (largest, columns)
    )
    factor = activation**ALPHA / weight ** (1 - ALPHA)
    by_column = factor[:, None].expand(*place.channels[:2], -1).flatten()
    made: Factors = dict.fromkeys(names, (1, by_column))
    for writer in place.writers:
        if writer in stored:  # a bias may be missing
            by_row = torch.ones(stored[writer].stored[0])
            by_row[stored[writer].taken] = 1 / factor.flatten()
            made[stored[writer].name] = 0, by_row
    return made
