"""The text that a draft head learns from: the user's, or conversations that its model writes."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint
from cetane.errors import CetaneError
from cetane.files import Progress, cache_dir, disk_errors, json_sha256, keep_tensors, kept_tensors
from cetane.fitting.attention import fuse_attention
from cetane.fitting.bfloat16 import narrowed
from cetane.fitting.conversations import write_conversations
from cetane.fitting.openings import questions
from cetane.gates.quality import read_tokens
from cetane.gates.reference import Reference
from cetane.pipeline.draft_head_result import DraftHeadSettings

TOGETHER = 128
"""Sequences of conversations that are written side by side."""
TOKENS = "tokens"
"""The name of the tensor in a file of conversations."""
VERSION = 2
"""Of the conversations. A new version is another folder, so the model writes them anew."""


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
