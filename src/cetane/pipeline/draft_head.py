"""The jobs of draft heads: trained on a bundle's own hidden states, or elsewhere, then lowered and
judged."""

import time
from collections.abc import Callable, Mapping, Sequence
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
from cetane.engine.engine import Engine
from cetane.engine.open import open_engine
from cetane.errors import CetaneError
from cetane.files import (
    Progress,
    cache_dir,
    claimed,
    disk_errors,
    json_sha256,
    keep_tensors,
    kept_tensors,
    sha256,
    silent,
)
from cetane.fitting.attention import fuse_attention
from cetane.fitting.conversations import write_conversations
from cetane.fitting.openings import questions
from cetane.fitting.teacher import narrowed
from cetane.gates.draft_head import (
    DraftHeadResult,
    audit_draft_head,
    judge_draft_head,
    keep_verdict,
)
from cetane.gates.quality import read_tokens
from cetane.gates.reference import Reference
from cetane.gates.residency.audit import Audit
from cetane.pipeline.origin import checkpoint_of
from cetane.schema.draft_head import DraftHeadKind, Training
from cetane.speculate.draft_heads.acceptance import Acceptance, acceptance
from cetane.speculate.draft_heads.build import add_draft_head, staging
from cetane.speculate.draft_heads.features import tapped
from cetane.speculate.draft_heads.modules import TorchDraftHead
from cetane.speculate.draft_heads.train import devices, new_draft_head, train
from cetane.speculate.draft_heads.trained import TrainedElsewhere, match_to, open_trained
from cetane.speculate.draft_heads.windows import Windows, collect, split
from cetane.speculate.open import DrafterOptions, longest_draft

TOGETHER = 128
"""Sequences of conversations that are written side by side."""
FEWER = 0.1
"""By how much the share of right first tokens may fall in another bundle. SmolLM2's fell by 0.02 in
6 bits and by nothing in 4.6; with a wrong factor on its hidden states it fell by 0.16."""
TOKENS = "tokens"
"""The name of the tensor in a file of conversations."""
VERSION = 2
"""Of the conversations. A new version is another folder, so the model writes them anew."""


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
    """The draft head in the bundle: the earlier one, if the new one failed its golden gate."""
    untrained: Acceptance | None
    """None for a draft head that was trained elsewhere."""
    trained: Acceptance
    elsewhere: Acceptance | None
    """What it knew where it was trained, if that was elsewhere."""
    golden: DraftHeadResult
    """The finished shard, compared with the trained module."""
    residency: Audit
    """Of `head`. A prediction: it warns, and does not affect `passed`."""
    windows: int
    """Windows of text for training."""
    held_out: int
    """Windows of text for judging."""
    minutes: float
    cpu_minutes: float

    @property
    def passed(self) -> bool:
        return self.golden.passed

    @property
    def placed(self) -> bool:
        """Whether the bundle has the new draft head, and not an earlier one of its kind."""
        return self.golden.heads[self.head.name] == self.head.digest

    @property
    def judged(self) -> bool:
        """Whether the held-out text tells what it knows."""
        return bool(self.trained.top1)

    @property
    def worse(self) -> bool:
        """Whether it knows far fewer first tokens than where it was trained: perhaps it is the
        draft head of another model of the same shape."""
        if self.elsewhere is None or not self.elsewhere.top1 or not self.judged:
            return False
        return self.trained.top1[0] < self.elsewhere.top1[0] - FEWER

    def as_json(self) -> dict[str, Any]:
        """The outcome as a JSON object."""
        return {
            "head": str(self.head.path),
            "digest": self.head.digest,
            "passed": self.passed,
            "placed": self.placed,
            "windows": self.windows,
            "held_out": self.held_out,
            "untrained": self.untrained and self.untrained.model_dump(mode="json"),
            "elsewhere": self.elsewhere and self.elsewhere.model_dump(mode="json"),
            "minutes": self.minutes,
            "cpu_minutes": self.cpu_minutes,
            "worse": self.worse,
            "trained": self.trained.model_dump(mode="json"),
            "residency": self.residency.passed,
            "golden": self.golden.model_dump(mode="json"),
        }


@dataclass(frozen=True)
class AddedDraftHeads:
    """Draft heads that were added to a bundle, and their gates."""

    heads: tuple[TrainedDraftHead, ...]

    @property
    def passed(self) -> bool:
        return all(one.passed for one in self.heads)

    def as_json(self) -> dict[str, Any]:
        """The outcome as a JSON object."""
        return {"passed": self.passed, "heads": [one.as_json() for one in self.heads]}


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

    Without `texts` the model writes conversations, in a third of the minutes at most. The draft
    head replaces an earlier one of its kind. `features` is a folder that keeps hidden states for
    another run. Under `torchrun` every process trains; the main process returns the outcome, the
    others None. CetaneError for a damaged bundle, too little text, and two texts of one name.
    """
    started, accelerator = time.monotonic(), devices()
    opened = Bundle(Path(bundle))
    opened.verify()
    job = f"training a draft head of the kind {kind}"
    with claimed(staging(opened, kind), job) if accelerator.is_main_process else nullcontext():
        checkpoint, engine = checkpoint_of(opened, model), open_engine(opened)
        embedding = embedding_of(opened)
        tapped(opened.plan)  # these two refuse before the model writes for many minutes
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
        return finish(
            opened, head, held, record, engine,
            started=started, progress=shown, trained=after, untrained=before,
        )  # fmt: skip


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
        return finish(
            bundle, head, held, there, engine,
            started=started, progress=progress, trained=score, elsewhere=knew,
        )  # fmt: skip


def finish(
    bundle: Bundle,
    head: TorchDraftHead,
    held: Windows,
    record: Training,
    engine: Engine,
    *,
    started: float,
    progress: Progress,
    trained: Acceptance,
    untrained: Acceptance | None = None,
    elsewhere: Acceptance | None = None,
) -> TrainedDraftHead:
    """Lower a draft head whose weights are rounded, and judge its shard. One that fails does not
    replace an earlier one."""
    verdicts: list[DraftHeadResult] = []

    def passes(made: DraftHead) -> bool:
        verdicts.append(judge_draft_head(bundle, made, engine, progress))
        return verdicts[-1].passed

    progress("lower", 0, 1)
    shard = add_draft_head(bundle, head, held.tokens, record, passes)
    (golden,) = verdicts
    result = TrainedDraftHead(
        head=shard, untrained=untrained, trained=trained, elsewhere=elsewhere, golden=golden,
        residency=audit_draft_head(bundle, shard), windows=record.windows, held_out=len(held),
        minutes=(time.monotonic() - started) / 60, cpu_minutes=time.process_time() / 60,
    )  # fmt: skip
    if result.placed:
        keep_verdict(bundle, golden)
    return result


def window_for(bundle: Bundle, settings: DraftHeadSettings) -> int:
    """Tokens of one forward pass, within the context. CetaneError for fewer than two drafts."""
    window = min(settings.window, bundle.plan.recipe.cache.context)
    if window < 2 * settings.steps:
        raise CetaneError(
            f"--window {window}: less than two drafts of {settings.steps} tokens",
            "give a larger --window, within the context, or fewer --steps",
        )
    return window


def tokens_of(
    texts: Sequence[Path], bundle: Bundle, settings: DraftHeadSettings
) -> dict[Path, list[int]]:
    """The tokens of text files. CetaneError for two of one name: the manifest knows only names."""
    if len({path.name for path in texts}) < len(texts):
        raise CetaneError("two texts have one name", "rename one of them")
    return {path: read_tokens(bundle.tokenizer, path, settings.tokens) for path in texts}


def tokens_written(
    conversations: Mapping[Path, torch.Tensor], settings: DraftHeadSettings
) -> dict[Path, list[int]]:
    """The tokens of conversations by file, as many as are asked for in all."""
    tokens = {path: own.flatten().tolist() for path, own in conversations.items()}
    return {
        path: own[: settings.tokens - index * len(own)]
        for index, (path, own) in enumerate(tokens.items())
    }


def own_conversations(
    checkpoint: Checkpoint, window: int, settings: DraftHeadSettings, progress: Progress
) -> dict[Path, torch.Tensor]:
    """Conversations that the model wrote, int64 `(sequences, window)`, by the file that keeps them.

    The files are in the cache folder, so that a stopped run and the next draft head go on with
    them. Other listed questions have another folder. New conversations are written for a third of
    the minutes. CetaneError for a model that is too large for this machine's memory.
    """
    asked = json_sha256([VERSION, questions()])[:8]
    place = cache_dir() / "conversations" / f"{checkpoint.fingerprint[:16]}-{window}-{asked}"
    made: dict[Path, torch.Tensor] = {}
    ends, write = time.monotonic() + 20 * settings.minutes, None
    for number in range(-(-settings.tokens // (TOGETHER * window))):
        path = place / f"{number:03}.safetensors"
        known = kept_tensors(path)
        if known is not None:
            made[path] = known[TOKENS]
            continue
        if made and time.monotonic() > ends:
            break
        progress("the model writes conversations", number * TOGETHER * window, settings.tokens)
        write = write or conversations_of(checkpoint, window)
        made[path] = write(number)
        with disk_errors(path):
            keep_tensors(path, {TOKENS: made[path]})
    return made


def conversations_of(checkpoint: Checkpoint, window: int) -> Callable[[int], torch.Tensor]:
    """A function that writes a batch of conversations, by its number."""
    reference = Reference(checkpoint)
    if not reference.resident:
        raise CetaneError("the model is too large to write its own text here", "give one: --text")
    model, tokenizer = reference.model, checkpoint.tokenizer
    fuse_attention(model)
    model(torch.tensor([[0]]), use_cache=False)  # reads its weights, which are narrowed below

    def write(number: int) -> torch.Tensor:
        with narrowed(model):
            return write_conversations(model, tokenizer, TOGETHER, window, number)

    return write


def whole_windows(texts: Sequence[list[int]], window: int) -> list[int]:
    """The tokens of all texts; the end of each that fills no window is left out.

    Raises CetaneError for fewer than two windows: one to learn from, and one to judge by.
    """
    ids = [token for text in texts for token in text[: len(text) - len(text) % window]]
    if len(ids) < 2 * window:
        raise CetaneError(
            f"{sum(map(len, texts))} tokens of text: too few for two windows of {window} tokens",
            "give more (--text, --tokens), or a smaller --window",
        )
    return ids


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
