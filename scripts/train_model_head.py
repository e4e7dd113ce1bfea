"""A long training of an EAGLE-3 draft head for a llama, from its checkpoint, without a bundle. On a
GPU it takes minutes. The model writes conversations, and the draft head reads the hidden states of
transformers' model. `cetane add-head BUNDLE FOLDER` puts the result into a bundle.

It needs no coremltools, only torch, transformers, accelerate, gguf and pydantic. So it runs on a
machine with a GPU that is not set up for cetane.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cetane.checkpoint import Checkpoint, open_checkpoint
from cetane.files import write_json
from cetane.fitting.attention import fuse_attention
from cetane.fitting.conversations import Writing, write_conversations
from cetane.gates.reference import Reference
from cetane.schema.draft_head import HELD_OUT, SOURCE, Training
from cetane.speculate.draft_heads.acceptance import acceptance
from cetane.speculate.draft_heads.modules import (
    DraftHeadConfig,
    TorchDraftHead,
    load_draft_head,
    make_draft_head,
)
from cetane.speculate.draft_heads.train import devices, feature_magnitudes, train
from cetane.speculate.draft_heads.trained import MAY_LACK, TRAINING
from cetane.speculate.draft_heads.windows import windows_of_model

WRITING = Writing(question=200, answer=192, listed=2)
"""Most answers to listed questions are harder to guess than those to the model's own, and nearer to
what users ask. The first tokens of an answer are the hardest, so answers are short."""
JUDGED, KEPT = 128, (8, 256)
"""Windows that are held out, and the windows and tokens of them that go with the draft head."""
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a Hugging Face folder or a GGUF file")
    parser.add_argument("folder", type=Path, help="the folder for the draft head")
    parser.add_argument("--layers", default="9,19,29", help="whose hidden states it reads")
    parser.add_argument("--tokens", type=int, default=6_303_744, help="tokens of conversations")
    parser.add_argument("--go-on", type=Path, help="a folder of this script, to train on from")
    parser.add_argument("--window", type=int, default=513, help="tokens of a sequence")
    parser.add_argument("--together", type=int, default=4096, help="sequences written side by side")
    parser.add_argument("--minutes", type=float, default=8.6, help="the most minutes in all")
    parser.add_argument("--batch", type=int, default=24, help="windows of a step")
    options = parser.parse_args()
    started, accelerator = time.monotonic(), devices()
    checkpoint = open_checkpoint(options.model)
    model = on_device(checkpoint, accelerator.device)
    say(started, "the model is read")
    tokens = written(model, checkpoint, options, started)
    held = min(JUDGED, max(1, len(tokens) // 10))
    layers = [int(layer) for layer in options.layers.split(",")]
    learned, judged = (
        windows_of_model(model, layers, part) for part in (tokens[held:], tokens[:held])
    )
    say(started, "its hidden states are computed")
    head = new_head(checkpoint, model.config, tokens, layers)
    embedding = checkpoint.read(EMBEDDING).float().to(accelerator.device)
    if options.go_on:
        take_over(head, options.go_on)
        say(started, f"before: {acceptance(head.to(accelerator.device), judged, embedding)}")
        scale = feature_magnitudes(learned).flatten()  # as training
        head.cpu().get_parameter("fuse.weight").data *= scale
    log = Log(started)
    left = options.minutes - (time.monotonic() - started) / 60
    train(head, learned, embedding, 1000, left, options.batch, log.progress, accelerator)
    score = acceptance(head.to(accelerator.device), judged, embedding)
    training = Training(
        data={}, windows=len(learned), length=options.window, held_out=held, **score.model_dump()
    )
    save(head.cpu(), tokens[: KEPT[0], : KEPT[1]], training, options.folder)
    say(started, f"{log.steps} steps on {accelerator.device}; {score}")


class Log:
    """Counts the steps of a training, and prints one in ten seconds."""

    def __init__(self, started: float) -> None:
        self.started, self.said, self.steps = started, 0.0, 0

    def progress(self, what: str, done: int, total: int) -> None:
        self.steps = done
        if time.monotonic() - self.said > 10:
            self.said = time.monotonic()
            say(self.started, f"step {done}, {what}")


def written(
    model: Any, checkpoint: Checkpoint, options: argparse.Namespace, started: float
) -> torch.Tensor:
    """Conversations that the model writes, int64 `(sequences, window)`."""
    texts: list[torch.Tensor] = []
    for number in range(max(1, options.tokens // (options.together * options.window))):
        texts.append(
            write_conversations(
                model, checkpoint.tokenizer, options.together, options.window, number, WRITING
            )
        )
        say(started, f"{sum(text.numel() for text in texts)} tokens of conversations")
    return torch.cat(texts)


def on_device(checkpoint: Checkpoint, device: torch.device) -> Any:
    """The checkpoint's transformers model, on a GPU in fp16."""
    reference = Reference(checkpoint, own=True)
    if not reference.resident:
        raise SystemExit("the model is too large for this script")
    model = reference.model
    fuse_attention(model)
    model(torch.tensor([[0]]), use_cache=False)  # reads its weights
    model.to(device)
    if device.type == "cuda":
        for parameter in model.parameters():  # not the buffers: rotary frequencies need fp32
            parameter.data = parameter.data.half()
    return model


def new_head(
    checkpoint: Checkpoint, config: Any, tokens: torch.Tensor, layers: list[int]
) -> TorchDraftHead:
    """An untrained draft head, which can propose the most frequent of these tokens."""
    counts = torch.bincount(tokens.flatten(), minlength=config.vocab_size)
    vocabulary = counts.argsort(descending=True, stable=True)[:8192].sort().values
    head = make_draft_head(
        DraftHeadConfig(
            kind="eagle3", hidden=config.hidden_size, rows=len(vocabulary), steps=3,
            eps=config.rms_norm_eps, bundle="", depths=tuple(f"layer-{n:02}" for n in layers),
        )
    )  # fmt: skip
    head.vocabulary = vocabulary
    rows = HEAD if HEAD in checkpoint else EMBEDDING
    head.output = checkpoint.read(rows).float()[vocabulary]
    head.norm = checkpoint.read(NORM).float()
    return head


def take_over(head: TorchDraftHead, folder: Path) -> None:
    """Give a draft head the weights of an earlier run, but its own vocabulary."""
    before = load_draft_head(folder / SOURCE, MAY_LACK)
    head.load_state_dict(dict(before.named_parameters()), strict=False)


def save(head: TorchDraftHead, held_out: torch.Tensor, training: Training, folder: Path) -> None:
    """Write the files that `cetane add-head` reads; the model's own rows are left out."""
    folder.mkdir(parents=True, exist_ok=True)
    head.save(folder / SOURCE, MAY_LACK)
    np.save(folder / HELD_OUT, held_out.numpy().astype(np.int32))
    write_json(folder / TRAINING, training.model_dump(mode="json"))


def say(started: float, what: str) -> None:
    """Print a line with the seconds since the start."""
    print(f"{time.monotonic() - started:.0f} s: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
