"""Training of draft heads on hidden states from the very calls that decode."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from cetane.build import Progress
from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint
from cetane.engine.engine import Engine
from cetane.errors import CetaneError
from cetane.families.flow import Data
from cetane.plan import Planner
from cetane.speculate.features import Taps, tapped
from cetane.speculate.heads import Head, HeadConfig, make_head

HELD_OUT = 10
"""Every so manyth window is kept from training."""
RATES = {"medusa": 1e-3, "eagle3": 1e-3}
"""Learning rates, which fall along a cosine."""
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


def collect(engine: Engine, ids: Sequence[int], length: int, progress: Progress) -> Windows:
    """Run a text through an engine, in windows of `length` tokens, each from its own start."""
    shards = tapped(engine.plan)
    starts = range(0, len(ids) - length + 1, length)
    if not starts:
        raise CetaneError(f"{len(ids)} tokens of text: too few for a window of {length}")
    features, choices = [], []
    for index, start in enumerate(starts):
        progress("hidden states", index, len(starts))
        session = engine.session()
        taps = Taps(session, shards)
        logits = session.feed(ids[start : start + length], "all")
        assert logits is not None
        features.append(torch.from_numpy(taps.take()).half())
        choices.append(torch.from_numpy(logits.argmax(-1)))
    tokens = torch.tensor([list(ids[start : start + length]) for start in starts])
    return Windows(torch.stack(features), tokens, torch.stack(choices))


def new_head(
    kind: Literal["medusa", "eagle3"],
    bundle: Bundle,
    checkpoint: Checkpoint,
    windows: Windows,
    rows: int,
    steps: int,
) -> Head:
    """An untrained head whose vocabulary is what the text and the target say most."""
    model = Planner(checkpoint, bundle.plan.recipe).model
    said = Counter(torch.cat([windows.tokens, windows.choices]).flatten().tolist())
    vocabulary = torch.tensor(sorted(token for token, _ in said.most_common(rows)))
    config = HeadConfig(
        kind=kind,
        hidden=model.hidden,
        rows=len(vocabulary),
        steps=steps,
        eps=model.eps,
        bundle=bundle.digest,
    )
    head = make_head(config)
    head.vocabulary = vocabulary
    head.output = checkpoint.read(model.output).float()[vocabulary]
    head.norm = checkpoint.read(model.norm).float() + model.unit_offset
    return head


def train(
    head: Head,
    windows: Windows,
    embedding: Tensor,
    epochs: int,
    minutes: float,
    batch: int,
    progress: Progress,
) -> None:
    """Fit a head to the target's own distributions over its vocabulary; ends after `epochs`, or
    when the time is over."""
    trained = [p for p in head.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, RATES[head.config.kind], betas=(0.9, 0.95))
    random = torch.Generator().manual_seed(0)
    steps, started, done = epochs * -(-len(windows) // batch), time.monotonic(), 0.0
    step = 0
    while done < 1:
        order = torch.randperm(len(windows), generator=random).tolist()
        for first in range(0, len(order), batch):
            done = max(step / steps, (time.monotonic() - started) / (60 * minutes))
            if done >= 1:
                break
            for group in optimizer.param_groups:
                group["lr"] = RATES[head.config.kind] * 0.5 * (1 + np.cos(np.pi * done))
            loss = loss_of(head, windows.part(order[first : first + batch]), embedding)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            step += 1
            progress(f"loss {loss.item():.3f}", step, steps)


def loss_of(head: Head, windows: Windows, embedding: Tensor) -> Tensor:
    """Cross entropy with the target's distributions, the later tokens weighing less."""
    features = windows.features.float()
    total = torch.zeros(())
    for step, logits in enumerate(head.teach(features, embedding[windows.tokens].float())):
        with torch.no_grad():
            wanted = head.target(features[:, 1 + step :, -1]).softmax(-1)
        losses = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(0, 1))
        total = total + losses * LATER**step
    return total


class Acceptance(Data):
    """How much of its drafts would be accepted, greedily, on windows that were held out."""

    top1: tuple[float, ...]
    """Share of right tokens at every place of a draft, where the text says what the target says."""
    accepted: tuple[float, ...]
    """Share of drafts that are right up to this place."""
    positions: int
    """Drafts that were judged."""


@torch.inference_mode()
def acceptance(head: Head, windows: Windows, embedding: Tensor, batch: int = 4) -> Acceptance:
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
