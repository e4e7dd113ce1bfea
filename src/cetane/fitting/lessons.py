"""Text for tuning, mostly a model's own, with the model's answers. It is kept, so it is made once.

It depends on no format. So a run that was interrupted goes on with it, and the next format of the
same model has it already.
"""

from __future__ import annotations

import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cetane.errors import CetaneError
from cetane.files import disk_errors, keep_tensors, kept_tensors
from cetane.fitting.bfloat16 import narrowed
from cetane.fitting.own_text import TextWriter
from cetane.fitting.teacher import Answers, ask

SEQUENCES, READ = 96, 32
"""A batch: the sequences that the model writes, and the windows of human text beside them."""
WIDER = 4
"""A GPU's batch is so many times as large: an H100 writes 768 sequences of SmolLM2 in 12 s, and 96
in 10 s."""
LEAST, MOST = 256, 4096
"""The least and the most sequences. Fewer would be learnt by heart. No run on two cores has time to
read more than half of a million tokens. A GPU reads a million several times in minutes."""
SEED = 2
"""The seed of the first batch; each next batch adds one. Rounding's text has another seed."""
PIECE, LOGITS = 1024, 1 << 28
"""What is answered at a time: tokens on a CPU, and logits on a GPU, of 1 GiB in fp32. They take
most of the memory. The GPU's figure is chosen by arithmetic, not measured: 5,461 tokens of a
vocabulary of 49,152 keep it busy."""


def lessons(writer: TextWriter, human: Tensor, folder: Path, seconds: float) -> Answers:
    """The answers of a writer's model: all that a folder keeps, and more that it makes in about
    `seconds`. It makes `LEAST` sequences even if that takes longer.

    It answers its own text, and windows of human text, `human (N, length)`, in turn.
    """
    model = writer.model
    parts: list[Answers] = []
    ends = time.perf_counter() + seconds
    wider = 1 if model.device.type == "cpu" else WIDER
    own_size, read_size = wider * SEQUENCES, wider * READ
    for number in count():
        path = folder / f"{number:03}.safetensors"
        part = load(path)
        if part is None:
            made = sum(len(one.tokens) for one in parts)
            if made >= LEAST and (made >= MOST or time.perf_counter() >= ends):
                break
            with narrowed(model):  # bfloat16 draws other words than fp32, as good ones
                own = writer.write(own_size, SEED + number, folder / f"{number:03}.text")
            turn = torch.arange(number * read_size, (number + 1) * read_size) % len(human)
            text = torch.cat([own, human[turn]])
            text = text[torch.randperm(len(text), generator=torch.Generator().manual_seed(number))]
            size = max(1, tokens_at_once(model) // writer.length)
            part = ask(model, text, size, writer.progress)
            with suppress(CetaneError), disk_errors(path):  # a cache may be full or locked
                keep(path, part)
        parts.append(part)
    fields = zip(*((part.tokens, part.likely, part.logs) for part in parts), strict=True)
    return Answers(*(torch.cat(field) for field in fields))


def tokens_at_once(model: Any) -> int:
    """The tokens that a model answers at a time."""
    if model.device.type == "cpu":
        return PIECE
    return LOGITS // int(model.get_output_embeddings().weight.shape[0])


def keep(path: Path, answers: Answers) -> None:
    """Keep answers."""
    tensors = {"tokens": answers.tokens, "likely": answers.likely, "logs": answers.logs}
    keep_tensors(path, tensors)


def load(path: Path) -> Answers | None:
    """What `keep` wrote; None if it is missing or has changed."""
    tensors = kept_tensors(path)
    if tensors is None:
        return None
    return Answers(tensors["tokens"], tensors["likely"], tensors["logs"])
