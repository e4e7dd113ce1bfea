"""Training of draft heads on hidden states from the very calls that decode."""

import hashlib
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, broadcast_object_list
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint
from cetane.engine.engine import Engine
from cetane.errors import CetaneError
from cetane.files import Progress, disk_errors, replacing
from cetane.planner import Planner
from cetane.speculate.draft_heads.features import Taps, tapped
from cetane.speculate.draft_heads.modules import (
    DraftHeadConfig,
    Eagle3,
    TorchDraftHead,
    make_draft_head,
)
from cetane.validation import Data

HELD_OUT = 10
"""Every so manyth window is kept from training."""
RATES = {"medusa": 3e-3, "eagle3": 1e-3}
"""Learning rates, which rise for the first `WARM` of the training and then fall along a cosine."""
WARM = 0.05
LATER = 0.8
"""What a drafted token counts in the loss, relative to the one before it."""


@dataclass(frozen=True)
class Windows:
    """What a target computes for windows of text: `features (W, n, 3, C)` fp16, `tokens (W, n)`,
    and `choices (W, n)`, its own greedy choice after every token."""

    features: Tensor
    tokens: Tensor
    choices: Tensor

    def part(self, indices: Sequence[int]) -> "Windows":
        at = list(indices)
        return Windows(self.features[at], self.tokens[at], self.choices[at])

    def __len__(self) -> int:
        return len(self.tokens)


def collect(
    engine: Engine, ids: Sequence[int], length: int, progress: Progress, folder: Path | None = None
) -> Windows:
    """Run a text through an engine, in windows of `length` tokens, each from its own start.

    A `folder` keeps what was computed, a file for each window under the hash of its tokens, so that
    a collection that was stopped goes on, and another head finds it done. It belongs to one bundle.
    """
    starts = range(0, len(ids) - length + 1, length)
    if not starts:
        raise CetaneError(f"{len(ids)} tokens of text: too few for a window of {length}")
    shape = (length, len(tapped(engine.plan)), engine.plan.hidden)
    tokens = torch.tensor([list(ids[start : start + length]) for start in starts])
    features = torch.empty((len(starts), *shape), dtype=torch.float16)
    choices = torch.empty_like(tokens)
    for index, window in enumerate(tokens):
        progress("hidden states", index, len(starts))
        path = folder and folder / f"{hashlib.sha256(window.numpy().tobytes()).hexdigest()}.st"
        found = kept(path, shape) if path else None
        if found is None:
            found = computed(engine, window.tolist())
            if path:
                path.parent.mkdir(parents=True, exist_ok=True)
                with disk_errors(path), replacing(path) as temporary:
                    save_file(found, temporary)
        features[index], choices[index] = found["features"], found["choices"]
    return Windows(features, tokens, choices)


def computed(engine: Engine, window: Sequence[int]) -> dict[str, Tensor]:
    """Features and choices of one window."""
    taps = Taps(engine.plan, tapped(engine.plan))
    session = engine.session(watch=[taps.see], whole=True)
    logits = session.feed(window, "all")
    assert logits is not None
    return {
        "features": torch.from_numpy(taps.take(session.position)).half().contiguous(),
        "choices": torch.from_numpy(logits.argmax(-1)),
    }


def kept(path: Path, shape: tuple[int, ...]) -> dict[str, Tensor] | None:
    """What an earlier collection computed, if it is there and whole."""
    try:
        found = load_file(path)
    except (OSError, SafetensorError):
        return None
    wanted = {"features": shape, "choices": shape[:1]}
    return found if {name: tuple(t.shape) for name, t in found.items()} == wanted else None


def new_draft_head(
    kind: Literal["medusa", "eagle3"],
    bundle: Bundle,
    checkpoint: Checkpoint,
    windows: Windows,
    rows: int,
    steps: int,
) -> TorchDraftHead:
    """An untrained head whose vocabulary is what the text and the target say most, then the lowest
    ids: byte pairs were merged in the order of how frequent they are. What the target cannot choose
    is not in it."""
    plan, model = bundle.plan, Planner(checkpoint, bundle.plan.recipe).model
    possible = set(plan.choosable.tolist())
    said = Counter(torch.cat([windows.tokens, windows.choices]).flatten().tolist())
    ranked = dict.fromkeys([*(token for token, _ in said.most_common()), *range(plan.vocab)])
    chosen = (token for token in ranked if token in possible)
    vocabulary = torch.tensor(sorted(islice(chosen, rows)))
    config = DraftHeadConfig(
        kind=kind,
        hidden=model.hidden,
        rows=len(vocabulary),
        steps=steps,
        eps=model.eps,
        softcap=model.softcap,
        bundle=bundle.digest,
    )
    head = make_draft_head(config)
    head.vocabulary = vocabulary
    head.output = checkpoint.read(model.output).float()[vocabulary]
    head.norm = checkpoint.read(model.norm).float() + model.unit_offset
    return head


def devices() -> Accelerator:
    """This process alone, on a GPU if torch has CUDA, or with those that a launcher started."""
    patience = InitProcessGroupKwargs(timeout=timedelta(days=1))  # one may compute what all need
    return Accelerator(
        cpu=not torch.cuda.is_available(), mixed_precision="no", kwargs_handlers=[patience]
    )


def train(
    head: TorchDraftHead,
    windows: Windows,
    embedding: Tensor,
    epochs: int,
    minutes: float,
    batch: int,
    progress: Progress,
    accelerator: Accelerator,
) -> None:
    """Fit a head to the target's own distributions over its vocabulary; ends after `epochs`, or
    when the time is over, by the clock of the main process. Products are of bf16 numbers.

    All processes have the same windows; in a step each learns from `batch` of its own, and all
    apply the mean of their gradients: the steps are those of one process with as many windows
    together, except that where the last ones do not divide evenly, some count twice.
    """
    scale = spread(windows) if isinstance(head, Eagle3) else torch.ones(())
    lesson = accelerator.prepare(Lesson(head, scale))
    trained = [p for p in head.parameters() if p.requires_grad]
    rate, betas = RATES[head.config.kind], (0.9, 0.95)
    optimizer = torch.optim.AdamW(trained, rate, betas, weight_decay=0.1)
    random = torch.Generator().manual_seed(0)
    together = batch * accelerator.num_processes
    steps, started, done = epochs * -(-len(windows) // together), time.monotonic(), 0.0
    limit = max(1.0, 60 * minutes)  # seconds
    step = 0
    while done < 1:
        order = torch.randperm(len(windows), generator=random).tolist()
        for first in range(0, len(order), together):
            done = max(step / steps, (time.monotonic() - started) / limit)
            (done,) = broadcast_object_list([done])
            if done >= 1:
                break
            for group in optimizer.param_groups:
                rise, fall = done / WARM, 0.5 * (1 + np.cos(np.pi * done))
                group["lr"] = rate * min(rise, fall)
            taken = order[first : first + together]
            with accelerator.split_between_processes(taken, apply_padding=True) as share:
                part = windows.part(share)
            embedded = embedding[part.tokens].to(accelerator.device)
            loss = lesson(part.features.to(accelerator.device).float(), embedded.float())
            optimizer.zero_grad()
            accelerator.backward(loss)
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            step += 1
            progress(f"loss {loss.item():.3f}", step, steps)
    head.cpu()
    if isinstance(head, Eagle3):  # the features that it reads from now on are as they are
        head.fuse.weight.data /= scale.flatten()


def spread(windows: Windows) -> Tensor:
    """How large the features of every tap and channel are, `(3, C)`: medians, since some tokens
    have a few channels that are a thousand times larger than all others."""
    sample = windows.features[:: max(1, len(windows) // 64)].flatten(0, 1).float()
    return sample.abs().median(0).values.clamp(min=1e-3)


class Lesson(nn.Module):
    """A head and its loss: a module, as processes average the gradients of a module's calls."""

    scale: Tensor

    def __init__(self, head: TorchDraftHead, scale: Tensor) -> None:
        super().__init__()
        self.head = head
        self.register_buffer("scale", scale)

    def forward(self, features: Tensor, embedded: Tensor) -> Tensor:
        """Cross entropy with the target's distributions, the later tokens weighing less."""
        total = torch.zeros((), device=features.device)
        with torch.autocast(features.device.type, torch.bfloat16), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Mismatch dtype")  # of a norm's gain, on purpose
            with torch.no_grad():
                target = self.head.capped(self.head.target(features[:, 1:, -1]))
                wanted = target.softmax(-1, torch.bfloat16)
            for step, logits in enumerate(self.head.teach(features / self.scale, embedded)):
                loss: Tensor = CrossEntropy.apply(self.head.capped(logits), wanted[:, step:])
                total = total + loss * LATER**step
        return total


class CrossEntropy(torch.autograd.Function):
    """Of logits `(..., R)` with probabilities, the mean; it keeps one tensor for its gradient
    instead of torch's five, which is what a large vocabulary takes its time for."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, wanted: Tensor) -> Tensor:
        said = logits.log_softmax(-1)
        losses = -(said * wanted).sum(-1, dtype=torch.float32)
        ctx.save_for_backward(said.exp_().sub_(wanted))
        return losses.mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * (grad / gradient[..., 0].numel()).to(gradient.dtype), None


class Acceptance(Data):
    """How much of its drafts would be accepted, greedily, on windows that were held out."""

    top1: tuple[float, ...]
    """Share of right tokens at every place of a draft, where the text says what the target says."""
    accepted: tuple[float, ...]
    """Share of drafts that are right up to this place."""
    positions: int
    """Drafts that were judged."""


@torch.inference_mode()
def acceptance(
    head: TorchDraftHead, windows: Windows, embedding: Tensor, batch: int = 4
) -> Acceptance:
    """Judge drafts from every position after which the text goes on as the target would, for as
    many tokens as a draft has: elsewhere a draft would not be verified against this text."""
    right: list[Tensor] = []
    for first in range(0, len(windows), batch):
        part = windows.part(range(first, min(first + batch, len(windows))))
        made = head.teach(part.features.float(), embedding[part.tokens].float())
        drafts = [head.vocabulary[logits.argmax(-1)] for logits in made]
        right.append(aligned(drafts, part.choices)[followed(part, len(drafts))])
    found = torch.cat(right).float()
    return Acceptance(
        top1=tuple(found.mean(0).tolist()),
        accepted=tuple(found.cumprod(1).mean(0).tolist()),
        positions=len(found),
    )


def aligned(drafts: Sequence[Tensor], choices: Tensor) -> Tensor:
    """Which drafted tokens are right, `(W, m, steps)`: token k of the draft from position i is
    about the token at i + 2 + k, which the target chose at position i + 1 + k."""
    count = choices.shape[1] - len(drafts)
    pairs = [
        draft[:, :count] == choices[:, 1 + step : 1 + step + count]
        for step, draft in enumerate(drafts)
    ]
    return torch.stack(pairs, -1)


def followed(windows: Windows, steps: int) -> Tensor:
    """Positions `(W, m)` after which the text says, up to the last token of a draft but one, what
    the target chose."""
    count = windows.tokens.shape[1] - steps
    same = windows.tokens[:, 1:] == windows.choices[:, :-1]
    return torch.stack([same[:, step : step + count] for step in range(steps)], -1).all(-1)


def split(windows: Windows) -> tuple[Windows, Windows]:
    """Windows to train on, and those held out, evenly from the whole text."""
    if len(windows) < 2:
        raise CetaneError("too little text for two windows", "give more, or a smaller --window")
    held = [i for i in range(len(windows)) if i % HELD_OUT == HELD_OUT - 1] or [len(windows) - 1]
    return windows.part([i for i in range(len(windows)) if i not in held]), windows.part(held)
