"""Draft heads that were trained elsewhere: for another bundle of the model, or for the model itself
on a faster machine."""

from copy import deepcopy
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
import torch

from cetane.bundle import Bundle
from cetane.bundle.draft_heads import DraftHead, DraftHeadFolder, open_windows
from cetane.checkpoint import Checkpoint, RotatedCheckpoint, Rotation
from cetane.errors import CetaneError
from cetane.families import Model
from cetane.files import inside, read_json
from cetane.planner import Planner
from cetane.schema.draft_head import HELD_OUT, MANIFEST, SOURCE, Training
from cetane.schema.manifest import MANIFEST as BUNDLE_MANIFEST
from cetane.speculate.draft_heads.features import tapped_blocks
from cetane.speculate.draft_heads.modules import TAPS, TorchDraftHead, load_draft_head
from cetane.speculate.draft_heads.train import gains, is_turned, projection_format
from cetane.validation import validated

MAY_LACK = frozenset({"output", "norm"})
"""The tensors that a file may leave out: the model has them."""
JUDGED = 16
"""The most windows of text on which a draft head from elsewhere is judged."""
TRAINING = "training.json"
"""The record of the training, beside a draft head that is in no bundle."""


@dataclass(frozen=True)
class TrainedElsewhere:
    """A trained draft head, and windows of text that it did not learn from, int64 `(W, n)`."""

    path: Path
    """The file of its weights."""
    draft_head: TorchDraftHead
    held_out: torch.Tensor
    training: Training


def shipped_draft_heads() -> dict[str, Path]:
    """The folders of the draft heads that come with cetane, by the name of their model."""
    folder = Path(str(resources.files("cetane"))) / "data/draft-heads"
    return {path.name: path for path in sorted(folder.iterdir()) if path.is_dir()}


def open_trained(place: str | Path) -> list[TrainedElsewhere]:
    """The draft heads at `place`. CetaneError if there is none, and for damaged files.

    It is a bundle, the folder of a draft head, or the name of a model whose draft head comes with
    cetane. A bundle or a folder wins over a name.
    """
    folder, known = Path(place), shipped_draft_heads()
    if (folder / BUNDLE_MANIFEST).is_file():
        bundle = Bundle(folder)
        if heads := bundle.draft_heads().values():
            return [from_bundle(bundle, head) for head in heads]
    elif (folder / SOURCE).is_file():
        return [read_folder(folder)]
    elif str(place) in known:
        return [read_folder(path) for path in sorted(known[str(place)].iterdir())]
    raise CetaneError(
        f"{place}: no draft head",
        "give a bundle that has one, the folder of one, or the name of a model whose draft head "
        f"comes with cetane: {', '.join(known)}",
    )


def from_bundle(bundle: Bundle, head: DraftHead) -> TrainedElsewhere:
    """The draft head of a bundle, whose files must be as its manifest says."""
    head.verify()
    draft_head = load_draft_head(head.file(SOURCE))
    if not draft_head.config.depths:  # it is older than these fields
        recipe = bundle.plan.recipe
        if recipe.compression.rotate:
            raise CetaneError(
                f"{head.path} does not say which channels it reads: an older cetane trained it",
                "train one for the new bundle",
            )
        scale = recipe.family.get("residual_scale", 1.0)
        changes = {"depths": tapped_blocks(bundle.plan), "scale": scale}
        draft_head.config = draft_head.config.model_copy(update=changes)
    return TrainedElsewhere(
        head.file(SOURCE), draft_head, few(head.held_out()), head.manifest.training
    )


def read_folder(folder: Path) -> TrainedElsewhere:
    """The draft head in a folder of its own, which holds no links."""
    path, training = inside(folder, SOURCE), training_of(folder)
    draft_head = load_draft_head(path, MAY_LACK)
    windows = open_windows(inside(folder, HELD_OUT), draft_head.config.steps)
    if draft_head.config.turned and draft_head.output.is_meta:
        raise CetaneError(f"{path}: a draft head of turned channels without its output rows")
    return TrainedElsewhere(path, draft_head, few(windows), training)


def training_of(folder: Path) -> Training:
    """The record of a draft head in a folder of its own. One that was in a bundle has a manifest,
    and its files must be as that says."""
    if inside(folder, MANIFEST).is_file():
        listed = DraftHeadFolder(folder)
        listed.verify()
        return listed.manifest.training
    about = inside(folder, TRAINING)
    return validated(Training, read_json(about, follow=False), str(about))


def few(windows: np.ndarray[Any, Any]) -> torch.Tensor:
    """The first windows of text, int64, few enough to judge a draft head in seconds."""
    return torch.from_numpy(np.array(windows[:JUDGED], np.int64))


def match_to(trained: TrainedElsewhere, bundle: Bundle, checkpoint: Checkpoint) -> TorchDraftHead:
    """A copy of the draft head that reads what this bundle hands on.

    `checkpoint` is the bundle's. A bundle may have turned channels, or another factor on its hidden
    states; then so has the copy, and computes the same. Its output rows stay as they are.
    CetaneError for a draft head of another model, and for one that reads other layers. So it is for
    a Medusa head between plain and turned channels.
    """
    draft_head, plan = deepcopy(trained.draft_head), bundle.plan
    config, reads = draft_head.config, tapped_blocks(plan)
    if config.hidden != plan.hidden or int(draft_head.vocabulary[-1]) >= plan.vocab:
        raise CetaneError(
            f"{trained.path}: the draft head of another model than {bundle.path}",
            f"cetane train-head {quote(str(bundle.path))} {config.kind} trains one for it",
        )
    if len(config.depths) != TAPS or any(config.depths[n] != reads[n] for n in config.taps):
        raise CetaneError(
            f"{trained.path}: the draft head reads {', '.join(config.depths) or 'unknown layers'}, "
            f"but {bundle.path} hands on {', '.join(reads)}",
            "port with the layout.chunks of its bundle, or train one for this bundle",
        )
    if config.turned != is_turned(checkpoint):
        try:
            draft_head.turn(Rotation(plan.hidden), back=config.turned)
        except NotImplementedError as error:
            raise CetaneError(
                f"{trained.path}: a {config.kind} head cannot move between plain and turned "
                "channels (compression.rotate)",
                "train one for this bundle, or give the folder of another kind: heads/eagle3",
            ) from error
    model = Planner(checkpoint, plan.recipe).model
    draft_head.rescale(model.residual_scale or 1.0)
    if draft_head.norm.is_meta:
        draft_head.norm = gains(model, checkpoint)
    if draft_head.output.is_meta:
        draft_head.output = plain_rows(model, checkpoint)[draft_head.vocabulary]
    changes = {"bundle": bundle.digest, "weights": projection_format(model, plan.recipe)}
    draft_head.config = draft_head.config.model_copy(update=changes)
    return draft_head


def plain_rows(model: Model, checkpoint: Checkpoint) -> torch.Tensor:
    """The rows of the model's head, `(V, C)` fp32, in its own channels."""
    if isinstance(checkpoint, RotatedCheckpoint):
        name = checkpoint.copies.get(model.output, model.output)
        return checkpoint.base.read(name).float()
    return checkpoint.read(model.output).float()
