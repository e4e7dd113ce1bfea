"""How many drafted tokens a target would accept, on text that was held out."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cetane.speculate.draft_heads.modules import TorchDraftHead
from cetane.speculate.draft_heads.windows import Windows
from cetane.validation import Data


class Acceptance(Data):
    """How often drafts are right, by their tokens' places; the target decodes greedily."""

    top1: tuple[float, ...]
    """Share of drafts whose token at this place is right."""
    accepted: tuple[float, ...]
    """Share of drafts that are right up to this place."""
    positions: int
    """Drafts that were judged."""


@torch.inference_mode()
def acceptance(
    draft_head: TorchDraftHead, windows: Windows, embedding: Tensor, batch: int = 4
) -> Acceptance:
    """Judge the drafts of a draft head on windows.

    A draft counts where the text goes on as the target would, for all tokens of the draft but the
    last: elsewhere the target's own continuation is not known.
    """
    right: list[Tensor] = []
    for first in range(0, len(windows), batch):
        part = windows.part(range(first, min(first + batch, len(windows))))
        made = draft_head.teach(part.features.float(), embedding[part.tokens].float())
        drafts = [draft_head.vocabulary[logits.argmax(-1)] for logits in made]
        right.append(aligned(drafts, part.choices)[followed(part, len(drafts))])
    together = torch.cat(right).float()
    return Acceptance(
        top1=tuple(together.mean(0).tolist()),
        accepted=tuple(together.cumprod(1).mean(0).tolist()),
        positions=len(together),
    )


def aligned(drafts: Sequence[Tensor], choices: Tensor) -> Tensor:
    """Which drafted tokens are right, `(W, m, steps)`.

    Token k of the draft from position i is about position i + 2 + k. The target chose that token
    at position i + 1 + k.
    """
    count = choices.shape[1] - len(drafts)
    pairs = [
        draft[:, :count] == choices[:, 1 + step : 1 + step + count]
        for step, draft in enumerate(drafts)
    ]
    return torch.stack(pairs, -1)


def followed(windows: Windows, steps: int) -> Tensor:
    """Positions `(W, m)` after which the text has the tokens that the target chose, for all tokens
    of a draft but the last."""
    count = windows.tokens.shape[1] - steps
    same = windows.tokens[:, 1:] == windows.choices[:, :-1]
    return torch.stack([same[:, step : step + count] for step in range(steps)], -1).all(-1)
