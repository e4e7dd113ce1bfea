"""The build of a draft head: lowers a trained one into a shard of its bundle."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from cetane.bundle import Bundle
from cetane.bundle.draft_heads import DraftHead
from cetane.checkpoint.names import model_name
from cetane.files import PARTIAL, disk_errors, records, remove, write_json
from cetane.lower.lower import Lowering
from cetane.lower.package import EXPORTER
from cetane.schema.draft_head import (
    FOLDER,
    HELD_OUT,
    MANIFEST,
    ROTARY,
    SOURCE,
    VOCABULARY,
    DraftHeadKind,
    DraftHeadManifest,
    Training,
)
from cetane.schema.manifest import producers
from cetane.speculate.draft_heads.features import tapped_shards
from cetane.speculate.draft_heads.modules import TorchDraftHead
from cetane.speculate.draft_heads.planner import DraftHeadPlanner, DraftHeadWeights


def add_draft_head(
    bundle: Bundle,
    draft_head: TorchDraftHead,
    held_out: torch.Tensor,
    training: Training,
    passes: Callable[[DraftHead], bool] = lambda _: True,
) -> DraftHead:
    """Lower a draft head, and put it into its bundle in place of an earlier one of its kind.

    An earlier one stays, and is returned, unless the new one `passes`.
    `TorchDraftHead.round` must have rounded its weights. `held_out (W, n)` are windows of text that
    were kept out of training. The draft head is made beside the bundle, and moved when complete. A
    kill leaves the bundle unchanged or, between two renames, without a draft head of this kind. It
    never leaves a part of one.
    """
    kind = draft_head.config.kind
    folder = staging(bundle, kind)
    with disk_errors(folder):
        remove(folder)
        made = folder / kind
        made.mkdir(parents=True)
        write(bundle, draft_head, held_out, training, made)
        good = passes(DraftHead(made, bundle.digest, bundle.plan))
        if good or kind not in bundle.draft_heads():
            place(made, bundle.file(f"{FOLDER}/{kind}"))
        remove(folder)
    return bundle.draft_heads()[kind]


def staging(bundle: Bundle, kind: DraftHeadKind) -> Path:
    """Where a draft head is made, beside its bundle."""
    whole = bundle.path.resolve()
    return whole.with_name(f"{whole.name}.{kind}{PARTIAL}")


def write(
    bundle: Bundle,
    draft_head: TorchDraftHead,
    held_out: torch.Tensor,
    training: Training,
    folder: Path,
) -> None:
    """Write all files of a draft head; the manifest comes last."""
    config = draft_head.config
    planner = DraftHeadPlanner(config, bundle.plan)
    named = {EXPORTER: model_name(bundle.manifest.source)}
    Lowering(planner, DraftHeadWeights(draft_head), named).lower(
        config.kind, folder / f"{config.kind}.mlpackage"
    )
    draft_head.save(folder / SOURCE)
    np.save(folder / VOCABULARY, draft_head.vocabulary.numpy().astype(np.int32))
    np.save(folder / HELD_OUT, held_out.numpy().astype(np.int32))
    if planner.caches:
        (table,) = planner.model.rotary.values()
        np.save(folder / ROTARY, table.cos_sin(planner.recipe.cache.context).numpy())
    shards = tapped_shards(bundle.plan)
    manifest = DraftHeadManifest(
        producer=producers(),
        kind=config.kind,
        bundle=bundle.digest,
        rows=config.rows,
        steps=config.steps,
        taps=tuple(shards[tap] for tap in config.taps),
        caches=planner.caches,
        weight_bytes=planner.weight_bytes,
        functions=planner.functions,
        training=training,
        files=records(folder, folder),
    )
    write_json(folder / MANIFEST, manifest.model_dump(mode="json"))


def place(made: Path, target: Path) -> None:
    """Move a finished folder to `target`. A folder that was there moves to `made`."""
    target.parent.mkdir(exist_ok=True)
    if target.exists():
        target.rename(made.with_name("earlier"))
    made.rename(target)
