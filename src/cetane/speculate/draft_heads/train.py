"""The training of draft heads, on hidden states of a bundle or of its model."""

import time
import warnings
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, broadcast_object_list
from torch import Tensor, nn

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint, RotatedCheckpoint
from cetane.errors import CetaneError
from cetane.families import Model, RMSNorm
from cetane.files import Progress
from cetane.planner import Planner
from cetane.schema.draft_head import DraftHeadKind
from cetane.schema.plan import Plan
from cetane.schema.recipe import Recipe
from cetane.speculate.draft_heads.features import tapped_blocks
from cetane.speculate.draft_heads.modules import (
    DraftHeadConfig,
    Eagle3,
    TorchDraftHead,
    make_draft_head,
)
from cetane.speculate.draft_heads.windows import Windows

RATES = {"medusa": 3e-3, "eagle3": 1e-3}
"""Learning rates. They rise during the first `WARM` of the training, then fall along a cosine."""
WARM = 0.05
LATER = 0.8
"""The weight of a drafted token in the loss, relative to the token before it."""


def new_draft_head(
    kind: DraftHeadKind,
    bundle: Bundle,
    checkpoint: Checkpoint,
    windows: Windows,
    rows: int,
    steps: int,
) -> TorchDraftHead:
    """An untrained draft head that can propose the `usual_tokens`, in drafts of `steps`."""
    plan, model = bundle.plan, Planner(checkpoint, bundle.plan.recipe).model
    vocabulary = usual_tokens(plan, windows, rows)
    config = DraftHeadConfig(
        kind=kind,
        hidden=model.hidden,
        rows=len(vocabulary),
        steps=steps,
        eps=model.eps,
        softcap=model.softcap,
        bundle=bundle.digest,
        depths=tapped_blocks(plan),
        scale=model.residual_scale or 1.0,
        turned=is_turned(checkpoint),
        weights=projection_format(model, plan.recipe),
    )
    draft_head = make_draft_head(config)
    draft_head.vocabulary = vocabulary
    draft_head.output = checkpoint.read(model.output).float()[vocabulary]
    draft_head.norm = gains(model, checkpoint)
    return draft_head


def usual_tokens(plan: Plan, windows: Windows, count: int) -> Tensor:
    """The `count` tokens that the text and the target use most, ascending, int64.

    If there are too few, the lowest ids follow, since a tokenizer numbers byte pairs by frequency.
    Tokens that the target cannot choose are left out.
    """
    possible = set(plan.choosable.tolist())
    said = Counter(torch.cat([windows.tokens, windows.choices]).flatten().tolist())
    ranked = dict.fromkeys([*(token for token, _ in said.most_common()), *range(plan.vocab)])
    chosen = (token for token in ranked if token in possible)
    return torch.tensor(sorted(islice(chosen, count)))


def gains(model: Model, checkpoint: Checkpoint) -> Tensor:
    """The gains of the model's last norm, fp32 `(C,)`, with any factor on its logits. CetaneError
    for a LayerNorm, and for an RMSNorm without gains: a draft head has only one with gains."""
    if model.final is not RMSNorm:
        raise CetaneError(
            "draft heads have only an RMSNorm with gains, and the model's last norm is another",
            "cetane run --speculative ngram drafts without one",
        )
    return (checkpoint.read(model.norm).float() + model.unit_offset) * model.logit_factor


def projection_format(model: Model, recipe: Recipe) -> Literal["fp16", "int8-per-channel"]:
    """The format of a draft head's projections: that of the target's head, if it is int8."""
    head = recipe.compression.format_for(model.output, "head").name
    return "int8-per-channel" if head == "int8-per-channel" else "fp16"


def is_turned(checkpoint: Checkpoint) -> bool:
    """Whether the residual stream of a checkpoint has turned channels."""
    return isinstance(checkpoint, RotatedCheckpoint) and checkpoint.stream is not None


def devices() -> Accelerator:
    """The devices to train on: a GPU if torch has CUDA, or all processes that a launcher such as
    torchrun started; else this process."""
    patience = InitProcessGroupKwargs(timeout=timedelta(days=1))  # others wait for hidden states
    return Accelerator(
        cpu=not torch.cuda.is_available(), mixed_precision="no", kwargs_handlers=[patience]
    )


def train(
    draft_head: TorchDraftHead,
    windows: Windows,
    embedding: Tensor,
    epochs: int,
    minutes: float,
    batch: int,
    progress: Progress,
    accelerator: Accelerator,
) -> None:
    """Fit a draft head to the target's own distributions over its vocabulary.

    `embedding (V, C)` is the target's. Training ends after `epochs`, or after `minutes` by the
    clock of the main process. Matrix products are in bf16.

    All processes have the same windows. In a step, each process learns from `batch` windows of its
    own. All apply the mean of their gradients, as one process with all these windows would. If the
    last windows do not divide evenly, some count twice.

    CetaneError if no minutes are left: a draft head of no training would only cost time.
    """
    (minutes,) = broadcast_object_list([minutes])
    if minutes <= 0:
        raise CetaneError(
            "text and hidden states took all minutes, so none is left to train",
            "give more --minutes, or less text with --tokens; conversations are kept",
        )
    scale = feature_magnitudes(windows) if isinstance(draft_head, Eagle3) else torch.ones(())
    lesson = accelerator.prepare(DraftHeadLoss(draft_head, scale))
    trained = [p for p in draft_head.parameters() if p.requires_grad]
    rate, betas = RATES[draft_head.config.kind], (0.9, 0.95)
    optimizer = torch.optim.AdamW(trained, rate, betas, weight_decay=0.1)
    together = batch * accelerator.num_processes
    steps, started = epochs * -(-len(windows) // together), time.monotonic()
    limit = max(1.0, 60 * minutes)  # seconds
    for step, taken in enumerate(drawn(len(windows), together)):
        percent = int(100 * (time.monotonic() - started) / limit)
        done = max(step / steps, percent / 100)  # whole percents, so that epochs are repeatable
        (done,) = broadcast_object_list([done])
        if done >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = rate * rate_share(done)
        with accelerator.split_between_processes(taken, apply_padding=True) as share:
            part = windows.part(share)
        embedded = embedding[part.tokens].to(accelerator.device)
        loss = lesson(part.features.to(accelerator.device).float(), embedded.float())
        optimizer.zero_grad()
        accelerator.backward(loss)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        progress(f"loss {loss.item():.3f}", step + 1, steps)
    draft_head.cpu()
    if isinstance(draft_head, Eagle3):  # drafting does not scale the features
        draft_head.fuse.weight.data /= scale.flatten()


def drawn(count: int, together: int) -> Iterator[list[int]]:
    """Numbers below `count`, `together` at a time, without end. Every epoch has all of them, in
    another order; each run has the same ones."""
    random = torch.Generator().manual_seed(0)
    while True:
        order = torch.randperm(count, generator=random).tolist()
        for first in range(0, count, together):
            yield order[first : first + together]


def rate_share(done: float) -> float:
    """The share of the learning rate that applies when a share `done` of the training is over."""
    return min(done / WARM, 0.5 * (1 + np.cos(np.pi * done)))


def feature_magnitudes(windows: Windows) -> Tensor:
    """The median magnitude of the features, by tap and channel, `(3, C)`.

    A mean would not do: in some tokens, a few channels are a thousand times larger than all others.
    """
    sample = windows.sample(64).flatten(0, 1).float()
    return sample.abs().median(0).values.clamp(min=1e-3).cpu()


class DraftHeadLoss(nn.Module):
    """A draft head and its loss. It is a module because processes average gradients over calls of a
    module."""

    scale: Tensor

    def __init__(self, draft_head: TorchDraftHead, scale: Tensor) -> None:
        super().__init__()
        self.draft_head = draft_head
        self.register_buffer("scale", scale)

    def forward(self, features: Tensor, embedded: Tensor) -> Tensor:
        """Cross entropy with the target's distributions; later tokens of a draft weigh less."""
        total = torch.zeros((), device=features.device)
        with torch.autocast(features.device.type, torch.bfloat16), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Mismatch dtype")  # a norm's gain differs on purpose
            with torch.no_grad():
                target = self.draft_head.capped(self.draft_head.target(features[:, 1:, -1]))
                wanted = target.softmax(-1, torch.bfloat16)
            for step, logits in enumerate(self.draft_head.teach(features / self.scale, embedded)):
                loss: Tensor = CrossEntropy.apply(self.draft_head.capped(logits), wanted[:, step:])
                total = total + loss * LATER**step
        return total


class CrossEntropy(torch.autograd.Function):
    """Mean cross entropy of logits `(..., R)` with probabilities of the same shape.

    It keeps one tensor for its gradient; torch keeps five, which take most of the time with a large
    vocabulary.
    """

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
