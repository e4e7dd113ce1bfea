"""The training of a draft head: on a bundle's own hidden states; then lowered, and judged."""

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from cetane.bundle import Bundle
from cetane.bundle.draft_heads import DraftHead
from cetane.checkpoint import Checkpoint
from cetane.engine.generate import open_engine
from cetane.errors import CetaneError
from cetane.files import Progress, cache_dir, claimed, disk_errors, replacing, sha256, silent
from cetane.fitting.answers import questions, write_answers
from cetane.gates.draft_head import DraftHeadResult, audit_draft_head, judge_draft_head
from cetane.gates.quality import read_tokens
from cetane.gates.reference import Reference
from cetane.gates.residency.audit import Audit
from cetane.pipeline.validate import checkpoint_of
from cetane.schema.draft_head import DraftHeadKind, Training
from cetane.speculate.draft_heads.acceptance import Acceptance, acceptance
from cetane.speculate.draft_heads.build import add_draft_head, staging
from cetane.speculate.draft_heads.train import devices, new_draft_head, train
from cetane.speculate.draft_heads.windows import Windows, collect, split


@dataclass(frozen=True)
class DraftHeadSettings:
    """How a draft head is trained."""

    tokens: int = 200_000
    """The most tokens of each text."""
    window: int = 256
    """Tokens of one forward pass; at most the bundle's context."""
    vocabulary: int = 8192
    """Tokens that the draft head may propose."""
    steps: int = 3
    """Tokens of a draft."""
    epochs: int = 10
    minutes: float = 30.0
    """The most minutes, including the computation of hidden states."""
    batch: int = 4
    """Windows of a training step, on each device."""


@dataclass(frozen=True)
class TrainedDraftHead:
    """A trained draft head and its gates."""

    head: DraftHead
    untrained: Acceptance
    trained: Acceptance
    golden: DraftHeadResult
    """The finished shard, compared with the trained module."""
    residency: Audit
    """A prediction: it warns, and does not affect `passed`."""
    windows: int
    """Windows of text for training."""
    held_out: int
    """Windows of text for judging."""
    minutes: float
    cpu_minutes: float

    @property
    def passed(self) -> bool:
        return self.golden.passed

    def as_json(self) -> dict[str, Any]:
        """The outcome as a JSON object."""
        return {
            "head": str(self.head.path),
            "digest": self.head.digest,
            "passed": self.passed,
            "windows": self.windows,
            "held_out": self.held_out,
            "untrained": self.untrained.model_dump(mode="json"),
            "minutes": self.minutes,
            "cpu_minutes": self.cpu_minutes,
            "trained": self.trained.model_dump(mode="json"),
            "residency": self.residency.passed,
            "golden": self.golden.model_dump(mode="json"),
        }


def train_draft_head(
    bundle: str | Path,
    kind: DraftHeadKind,
    texts: Sequence[Path],
    *,
    settings: DraftHeadSettings = DraftHeadSettings(),
    model: str | Path | None = None,
    features: Path | None = None,
    progress: Progress = silent,
) -> TrainedDraftHead | None:
    """Train a draft head on text files, and add it to the bundle as a shard.

    Without `texts` the model writes one, in a third of the minutes at most. The draft head replaces
    an earlier one of its kind. `features` is a folder that keeps hidden states for another run.
    Under `torchrun` every process trains; the main process returns the outcome, the others None.
    CetaneError for too little text.
    """
    started, accelerator = time.monotonic(), devices()
    opened = Bundle(Path(bundle))
    opened.verify()
    job = f"training a draft head of the kind {kind}"
    with claimed(staging(opened, kind), job) if accelerator.is_main_process else nullcontext():
        checkpoint, engine = checkpoint_of(opened, model), open_engine(opened)
        window = min(settings.window, opened.plan.recipe.cache.context)
        if window < 2 * settings.steps:
            raise CetaneError(f"--window {window}: less than two drafts of {settings.steps} tokens")
        shown = progress if accelerator.is_main_process else silent
        with accelerator.main_process_first():  # others read what it wrote
            texts = texts or [own_answers(checkpoint, settings, shown)]
        ids = whole_windows(
            [read_tokens(opened.tokenizer, p, settings.tokens) for p in texts], window
        )
        folder = features and features / opened.digest
        with accelerator.main_process_first() if folder else nullcontext():  # others read them
            learned, held = split(collect(engine, ids, window, shown, folder))
        embedding = embedding_of(opened)
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
        shown("lower", 0, 1)
        shard = add_draft_head(opened, head, held.tokens, trained_on(texts, learned, held, after))
        judged = judge_draft_head(opened, shard, engine, shown)
        return TrainedDraftHead(
            shard, before, after, judged, audit_draft_head(opened, shard), len(learned), len(held),
            minutes=(time.monotonic() - started) / 60, cpu_minutes=time.process_time() / 60,
        )  # fmt: skip


def own_answers(checkpoint: Checkpoint, settings: DraftHeadSettings, progress: Progress) -> Path:
    """A file of questions with the model's own answers, which the cache folder keeps.

    CetaneError for a model that is too large for this machine's memory.
    """
    asked = f"{checkpoint.fingerprint[:16]}-{settings.tokens}-{settings.minutes:g}"
    path = cache_dir() / "answers" / f"{asked}.txt"
    if path.exists():
        return path
    reference, ends = Reference(checkpoint), time.monotonic() + 20 * settings.minutes
    if not reference.resident:
        raise CetaneError("the model is too large to write its own text here", "give one: --text")
    texts: list[str] = []
    written, tokenizer = 0, checkpoint.tokenizer
    for some in write_answers(reference.model, tokenizer, questions()):
        texts += some
        written += sum(len(tokenizer.encode(text)) for text in some)
        progress("the model answers questions", min(written, settings.tokens), settings.tokens)
        if written >= settings.tokens or time.monotonic() > ends:
            break
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_text("\n".join(texts), encoding="utf-8")
    return path


def whole_windows(texts: Sequence[list[int]], window: int) -> list[int]:
    """The tokens of all texts; the end of each that fills no window is left out."""
    return [token for text in texts for token in text[: len(text) - len(text) % window]]


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
    data: Mapping[str, str] = {path.name: sha256(path) for path in texts}
    return Training(
        data=dict(data), windows=len(learned), length=learned.tokens.shape[1],
        held_out=len(held), **scores.model_dump(),
    )  # fmt: skip
