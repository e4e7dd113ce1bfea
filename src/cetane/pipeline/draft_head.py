"""The jobs of draft heads: trained on a bundle's own hidden states, or elsewhere, then lowered and
judged."""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator

from cetane.bundle import Bundle
from cetane.bundle.draft_heads import DraftHead
from cetane.engine.engine import Engine
from cetane.engine.open import open_engine
from cetane.errors import CetaneError
from cetane.files import Progress, claimed, sha256, silent
from cetane.gates.draft_head import (
    DraftHeadResult,
    audit_draft_head,
    judge_draft_head,
    keep_verdict,
)
from cetane.pipeline.draft_head_result import (
    DEFAULTS,
    AddedDraftHeads,
    DraftHeadSettings,
    TrainedDraftHead,
)
from cetane.pipeline.draft_head_text import (
    own_conversations,
    tokens_of,
    tokens_written,
    whole_windows,
    window_for,
)
from cetane.pipeline.origin import checkpoint_of
from cetane.schema.draft_head import DraftHeadKind, Training
from cetane.speculate.draft_heads.acceptance import Acceptance, acceptance
from cetane.speculate.draft_heads.build import add_draft_head, staging
from cetane.speculate.draft_heads.features import tapped_shards
from cetane.speculate.draft_heads.modules import TorchDraftHead
from cetane.speculate.draft_heads.train import devices, new_draft_head, train
from cetane.speculate.draft_heads.trained import TrainedElsewhere, match_to, open_trained
from cetane.speculate.draft_heads.windows import Windows, collect, split
from cetane.speculate.open import DrafterOptions, longest_draft


def train_draft_head(
    bundle: str | Path,
    kind: DraftHeadKind,
    texts: Sequence[Path],
    *,
    settings: DraftHeadSettings = DEFAULTS,
    model: str | Path | None = None,
    features: Path | None = None,
    progress: Progress = silent,
) -> TrainedDraftHead | None:
    """Train a draft head on text files, and add it to the bundle as a shard.

    Without `texts` the model writes conversations, in a third of the minutes at most. The draft
    head replaces an earlier one of its kind. `features` is a folder that keeps hidden states for
    another run. Under `torchrun` every process trains; the main process returns the outcome, the
    others None. CetaneError for a damaged bundle, too little text, two texts of one name, and no
    minutes.
    """
    if settings.minutes <= 0:
        raise CetaneError(f"{settings.minutes:g} minutes: no time to train", "give more --minutes")
    started, accelerator = time.monotonic(), devices()
    opened = Bundle(Path(bundle))
    opened.verify()
    job = f"training a draft head of the kind {kind}"
    with claimed(staging(opened, kind), job) if accelerator.is_main_process else nullcontext():
        checkpoint, engine = checkpoint_of(opened, model), open_engine(opened)
        embedding = embedding_of(opened)
        tapped_shards(opened.plan)  # these two refuse before the model writes for many minutes
        longest_draft(DrafterOptions(), engine)
        window = window_for(opened, settings)
        shown = progress if accelerator.is_main_process else silent
        if texts:
            read = tokens_of(texts, opened, settings)
        else:
            with accelerator.main_process_first():  # others read what it wrote
                written = own_conversations(checkpoint, window, settings, shown)
            read = tokens_written(written, settings)
        ids = whole_windows(list(read.values()), window)
        folder = features and features / opened.digest
        with accelerator.main_process_first() if folder else nullcontext():  # others read them
            learned, held = split(collect(engine, ids, window, shown, folder))
        head = new_draft_head(
            kind, opened, checkpoint, learned, settings.vocabulary, settings.steps
        )
        before = acceptance(head, held, embedding)
        left = settings.minutes - (time.monotonic() - started) / 60
        train(head, learned, embedding, settings.epochs, left, settings.batch, shown, accelerator)
        if not is_main(accelerator):
            return None
        head.round()
        after = acceptance(head, held, embedding)
        record = trained_on(list(read), learned, held, after)
        adding = Adding(opened, engine, started, shown)
        return adding.add(head, held, record, trained=after, untrained=before)


def add_draft_heads(
    bundle: str | Path,
    trained: str | Path,
    *,
    model: str | Path | None = None,
    progress: Progress = silent,
) -> AddedDraftHeads:
    """Add draft heads that were trained elsewhere to a bundle, without training.

    `trained` is a bundle of the same model, the folder of a draft head, or the name of a model
    whose draft head comes with cetane. Each is judged on its own held-out windows. CetaneError for
    a damaged bundle, and for a draft head that does not fit.
    """
    opened, found = Bundle(Path(bundle)), open_trained(trained)
    opened.verify()
    if any(one.path.resolve().is_relative_to(opened.path.resolve()) for one in found):
        raise CetaneError(f"{trained}: these draft heads are in {bundle} already")
    checkpoint, engine = checkpoint_of(opened, model), open_engine(opened)
    longest_draft(DrafterOptions(), engine)
    matched = [match_to(one, opened, checkpoint) for one in found]  # refuses before any is added
    pairs = zip(found, matched, strict=True)
    return AddedDraftHeads(tuple(add_matched(opened, *pair, engine, progress) for pair in pairs))


def add_matched(
    bundle: Bundle,
    source: TrainedElsewhere,
    head: TorchDraftHead,
    engine: Engine,
    progress: Progress,
) -> TrainedDraftHead:
    """Add a draft head that fits its bundle, which `engine` runs."""
    started, kind = time.monotonic(), head.config.kind
    with claimed(staging(bundle, kind), f"adding a draft head of the kind {kind}"):
        length = min(source.held_out.shape[1], bundle.plan.recipe.cache.context)
        tokens = source.held_out[:, :length]
        held = collect(engine, tokens.flatten().tolist(), length, progress)
        head.round()
        score, there = acceptance(head, held, embedding_of(bundle)), source.training
        knew = Acceptance(top1=there.top1, accepted=there.accepted, positions=there.positions)
        adding = Adding(bundle, engine, started, progress)
        return adding.add(head, held, there, trained=score, elsewhere=knew)


@dataclass(frozen=True)
class Adding:
    """The end of both jobs, which began at `started`: a draft head becomes a shard of a bundle that
    `engine` runs."""

    bundle: Bundle
    engine: Engine
    started: float
    progress: Progress

    def add(
        self,
        head: TorchDraftHead,
        held: Windows,
        record: Training,
        *,
        trained: Acceptance,
        untrained: Acceptance | None = None,
        elsewhere: Acceptance | None = None,
    ) -> TrainedDraftHead:
        """Lower a draft head whose weights are rounded, and judge its shard. One that fails does
        not replace an earlier one."""
        verdicts: list[DraftHeadResult] = []

        def passes(made: DraftHead) -> bool:
            verdicts.append(judge_draft_head(self.bundle, made, self.engine, self.progress))
            return verdicts[-1].passed

        self.progress("lower", 0, 1)
        shard = add_draft_head(self.bundle, head, held.tokens, record, passes)
        (golden,) = verdicts
        result = TrainedDraftHead(
            head=shard, untrained=untrained, trained=trained, elsewhere=elsewhere, golden=golden,
            residency=audit_draft_head(self.bundle, shard), windows=record.windows,
            held_out=len(held), minutes=(time.monotonic() - self.started) / 60,
            cpu_minutes=time.process_time() / 60,
        )  # fmt: skip
        if result.placed:
            keep_verdict(self.bundle, golden)
        return result


def embedding_of(bundle: Bundle) -> torch.Tensor:
    """The host's embedding table, `(V, C)` fp16."""
    rows = bundle.tables().embedding
    return torch.from_numpy(np.asarray(rows[np.arange(rows.shape[0])], np.float16))


def is_main(accelerator: Accelerator) -> bool:
    """Whether this process is the one that continues after training."""
    accelerator.end_training()
    return bool(accelerator.is_main_process)


def trained_on(
    texts: Sequence[Path], learned: Windows, held: Windows, scores: Acceptance
) -> Training:
    """The record of the training, for the draft head's manifest."""
    return Training(
        data={path.name: sha256(path) for path in texts},
        windows=len(learned),
        length=learned.tokens.shape[1],
        held_out=len(held),
        **scores.model_dump(),
    )
