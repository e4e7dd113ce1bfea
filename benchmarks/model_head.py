"""A long training of an EAGLE-3 draft head for a llama, from its checkpoint, without a bundle. On a
GPU it takes minutes. The model writes conversations, and the draft head reads the hidden states of
transformers' model. `cetane add-head BUNDLE FOLDER` puts the result into a bundle.

It needs torch, transformers and accelerate, and no coremltools.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from cetane.checkpoint import Checkpoint, open_checkpoint
from cetane.fitting.attention import fuse_attention
from cetane.fitting.conversations import Lengths, write_conversations
from cetane.gates.reference import Reference
from cetane.schema.draft_head import HELD_OUT, SOURCE
from cetane.speculate.draft_heads.acceptance import acceptance
from cetane.speculate.draft_heads.modules import DraftHeadConfig, TorchDraftHead, make_draft_head
from cetane.speculate.draft_heads.train import devices, train
from cetane.speculate.draft_heads.trained import OUTPUT
from cetane.speculate.draft_heads.windows import ModelWindows

LENGTHS = Lengths(question=200, answer=320, listed=6)
JUDGED, KEPT = 128, (8, 256)
"""Windows that are held out, and the windows and tokens of them that go with the draft head."""
EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a Hugging Face folder or a GGUF file")
    parser.add_argument("folder", type=Path, help="the folder for the draft head")
    parser.add_argument("--layers", default="9,19,29", help="whose hidden states it reads")
    parser.add_argument("--tokens", type=int, default=8_388_608, help="tokens of conversations")
    parser.add_argument("--window", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--together", type=int, default=4096, help="sequences written side by side")
    parser.add_argument("--minutes", type=float, default=8.6, help="the most minutes in all")
    parser.add_argument("--batch", type=int, default=24, help="windows of a step")
    options = parser.parse_args()
    started, accelerator = time.monotonic(), devices()
    checkpoint = open_checkpoint(options.model)
    model = on_device(checkpoint, accelerator.device)
    say(started, "the model is read")
    texts: list[torch.Tensor] = []
    for number in range(max(1, options.tokens // (options.together * options.window))):
        texts.append(
            write_conversations(
                model, checkpoint.tokenizer, options.together, options.window, number, LENGTHS
            )
        )
        say(started, f"{sum(text.numel() for text in texts)} tokens of conversations")
    tokens = torch.cat(texts)
    held = min(JUDGED, max(1, len(tokens) // 10))
    layers = [int(layer) for layer in options.layers.split(",")]
    learned, judged = (ModelWindows(model, layers, part) for part in (tokens[held:], tokens[:held]))
    head = new_head(checkpoint, model.config, tokens, layers)
    embedding = checkpoint.read(EMBEDDING).float().to(accelerator.device)
    steps = [0, 0.0]

    def progress(what: str, done: int, total: int) -> None:
        if time.monotonic() - steps[1] > 10:
            steps[1] = time.monotonic()
            say(started, f"step {done}, {what}")
        steps[0] = done

    left = options.minutes - (time.monotonic() - started) / 60
    train(head, learned, embedding, 1000, left, options.batch, progress, accelerator)
    score = acceptance(head.to(accelerator.device), judged, embedding)
    about = {
        "model": Path(options.model).name, "device": device_name(accelerator.device),
        "tokens": tokens.numel(), "window": options.window, "batch": options.batch,
        "steps": steps[0], "seconds": round(time.monotonic() - started), **score.model_dump(),
    }  # fmt: skip
    save(head.cpu(), tokens[: KEPT[0], : KEPT[1]], about, options.folder)
    print(json.dumps(about))


def on_device(checkpoint: Checkpoint, device: torch.device) -> Any:
    """The checkpoint's transformers model, on a GPU in fp16."""
    model = Reference(checkpoint).model
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
    head.output = checkpoint.read(EMBEDDING).float()[vocabulary]
    head.norm = checkpoint.read(NORM).float()
    return head


def save(head: TorchDraftHead, held_out: torch.Tensor, about: dict[str, Any], folder: Path) -> None:
    """Write the files that `cetane add-head` reads; the model's own rows are left out."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (tensor.half() if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in head.state_dict().items()
        if name not in OUTPUT
    }
    save_file(tensors, folder / SOURCE, {"cetane": head.config.model_dump_json()})
    np.save(folder / HELD_OUT, held_out.numpy().astype(np.int32))
    (folder / "about.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def say(started: float, what: str) -> None:
    """Print a line with the seconds since the start."""
    print(f"{time.monotonic() - started:.0f} s: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
