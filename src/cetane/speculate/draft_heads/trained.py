"""Draft heads that were trained elsewhere: for another bundle of the model, or for the model itself
on a faster machine."""

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import torch

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint, RotatedCheckpoint, Turn
from cetane.errors import CetaneError
from cetane.families import Model
from cetane.npy import open_array
from cetane.planner import Planner
from cetane.schema.draft_head import FOLDER, HELD_OUT, KINDS, SOURCE
from cetane.speculate.draft_heads.features import depths
from cetane.speculate.draft_heads.modules import TorchDraftHead, load_draft_head
from cetane.speculate.draft_heads.train import gains, projections

OUTPUT = frozenset({"output", "norm"})
"""The tensors that a file may leave out: they are the model's."""


@dataclass(frozen=True)
class TrainedElsewhere:
    """A trained draft head, and windows of text that it did not learn from, int64 `(W, n)`."""

    path: Path
    """The file of its weights."""
    draft_head: TorchDraftHead
    held_out: torch.Tensor


def shipped() -> dict[str, Path]:
    """The folders of the draft heads that come with cetane, by the name of their model."""
    folder = Path(str(resources.files("cetane"))) / "data/draft-heads"
    return {path.name: path for path in sorted(folder.iterdir()) if path.is_dir()}


def open_trained(place: str | Path) -> list[TrainedElsewhere]:
    """The draft heads at `place`. CetaneError if there is none.

    It is a bundle, the folder of a draft head, or the name of a model whose draft head comes with
    cetane.
    """
    known = shipped()
    top = known.get(str(place), Path(place))
    places = [folder / kind for folder in (top, top / FOLDER) for kind in KINDS]
    found = [folder for folder in (top, *places) if (folder / SOURCE).is_file()]
    if not found:
        raise CetaneError(
            f"{place}: no draft head",
            f"give a bundle that has one, or a name: {', '.join(known)}",
        )
    return [read_trained(folder) for folder in found]


def read_trained(folder: Path) -> TrainedElsewhere:
    """The draft head in a folder. CetaneError for damaged files."""
    draft_head = load_draft_head(folder / SOURCE, OUTPUT)
    windows = np.array(open_array(folder / HELD_OUT, "<i4", (None, None)), np.int64)
    if not len(windows) or windows.shape[1] < 2 * draft_head.config.steps:
        raise CetaneError(f"{folder / HELD_OUT}: windows of a wrong shape, {windows.shape}")
    return TrainedElsewhere(folder / SOURCE, draft_head, torch.from_numpy(windows))


def fit_to(trained: TrainedElsewhere, bundle: Bundle, checkpoint: Checkpoint) -> TorchDraftHead:
    """The draft head, made to read what this bundle hands on.

    `checkpoint` is the bundle's. A bundle may have turned channels; then so has the draft head, and
    computes the same. CetaneError for a draft head of another model, or one that reads the hidden
    states of other layers.
    """
    draft_head, plan = trained.draft_head, bundle.plan
    config, reads = draft_head.config, depths(plan)
    least, most = draft_head.vocabulary.min(), draft_head.vocabulary.max()
    if config.hidden != plan.hidden or not 0 <= least <= most < plan.vocab:
        raise CetaneError(f"{trained.path}: the draft head of another model than {bundle.path}")
    if config.depths != reads:
        raise CetaneError(
            f"{trained.path}: the draft head reads {', '.join(config.depths) or 'unknown layers'}, "
            f"but {bundle.path} hands on {', '.join(reads)}",
            "port with the layout.chunks of its bundle, or train one for this bundle",
        )
    turned = isinstance(checkpoint, RotatedCheckpoint) and checkpoint.stream is not None
    if config.turned != turned:
        draft_head.turn(Turn(plan.hidden), back=config.turned)
    model = Planner(checkpoint, plan.recipe).model
    draft_head.rescale(model.residual_scale or 1.0)
    if draft_head.norm.is_meta:
        draft_head.norm = gains(model, checkpoint)
    if draft_head.output.is_meta:
        draft_head.output = plain_rows(model, checkpoint)[draft_head.vocabulary]
    form = projections(plan.recipe.compression.format_for(model.output, "head").name)
    changes = {"bundle": bundle.digest, "weights": form}
    draft_head.config = draft_head.config.model_copy(update=changes)
    return draft_head


def plain_rows(model: Model, checkpoint: Checkpoint) -> torch.Tensor:
    """The rows of the model's head, `(V, C)` fp32, in its own channels."""
    if isinstance(checkpoint, RotatedCheckpoint):
        name = checkpoint.copies.get(model.output, model.output)
        return checkpoint.base.read(name).float()
    return checkpoint.read(model.output).float()
