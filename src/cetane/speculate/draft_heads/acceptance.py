"""Acceptance: the share of drafted tokens that a target accepts, on held-out text."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cetane.speculate.draft_heads.modules import TorchDraftHead
from cetane.speculate.draft_heads.windows import Windows
from cetane.validation import Data

BATCH = 4  # windows


class Acceptance(Data):
    """The shares of right tokens, by their place in a draft; none if no draft was judged. The
    target decodes greedily."""

    top1: tuple[float, ...]
    """Share of drafts whose token at this place is right."""
    accepted: tuple[float, ...]
    """Share of drafts that are right up to and with this place."""
    positions: int
    """Drafts that were judged."""


@torch.inference_mode()
def acceptance(draft_head: TorchDraftHead, windows: Windows, embedding: Tensor) -> Acceptance:
    """Judge the drafts of a draft head on windows.

    A draft counts only if the text follows the target's own choices, for all tokens of the draft
    but the last. Elsewhere the target's continuation is unknown.
    """
    right: list[Tensor] = []
    for first in range(0, len(windows), BATCH):
        part = windows.part(range(first, min(first + BATCH, len(windows))))
        made = draft_head.teach(part.features.float(), embedding[part.tokens].float())
        drafts = [draft_head.vocabulary[logits.argmax(-1)] for logits in made]
        right.append(aligned(drafts, part.choices)[followed(part, len(drafts))])
    together = torch.cat(right).float()
    if not len(together):
        return Acceptance(top1=(), accepted=(), positions=0)
    return Acceptance(
        top1=tuple(together.mean(0).tolist()),
        accepted=tuple(together.cumprod(1).mean(0).tolist()),
        positions=len(together),
    )


def aligned(drafts: Sequence[Tensor], choices: Tensor) -> Tensor:
    """Whether each drafted token is right, `(W, m, steps)`.

    Token k of the draft from position i belongs to position i + 2 + k. The target chose that token
    at position i + 1 + k.
    """
    count = choices.shape[1] - len(drafts)
    pairs = [
        draft[:, :count] == choices[:, 1 + step : 1 + step + count]
        for step, draft in enumerate(drafts)
    ]
    return torch.stack(pairs, -1)


def followed(windows: Windows, steps: int) -> Tensor:
    """The positions `(W, m)` after which the text follows the target's choices, for all tokens of a
    draft but the last."""
    count = windows.tokens.shape[1] - steps
    same = windows.tokens[:, 1:] == windows.choices[:, :-1]
    return torch.stack([same[:, step : step + count] for step in range(steps)], -1).all(-1)
