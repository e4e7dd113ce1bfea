"""The choice of a head's largest logit: by maxima and comparisons, or by argmax, which leaves the
ANE."""

import torch
from torch import Tensor

from cetane.schema.interface import MASKED


def choose(logits: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The row of the largest logit, the first of equals, and that logit.

    `logits (1, R, T)`. The row is `(2, T)`: a block of `size` rows, and the place in it. The logit
    is `(1, T)`. NaN is never chosen: a token whose largest logit is NaN gets a row beyond the last.
    """
    rows = int(logits.shape[1])
    count = -(-rows // size)
    missing = count * size - rows
    if missing:  # the last rows once more: their equals come first, so they are never chosen
        logits = torch.cat([logits, logits[:, rows - missing :]], dim=1)
    blocks = logits.transpose(1, 2).reshape(1, -1, count, size)
    largest = blocks.amax(3)
    logit = largest.amax(2, keepdim=True)
    block, others = first(largest == logit, count)
    inside = torch.where(others[..., None], blocks, torch.full((1,), MASKED)).amax(2)
    place, _ = first(inside == logit, size)
    return torch.cat([block, place]), logit.reshape(1, -1)


def first(equal: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The first true place on the last axis of `(1, T, count)`, and where that is.

    The place is `(1, T)`, and `count` if there is none.
    """
    left = torch.where(equal, torch.arange(count, 0, -1, dtype=torch.float32), torch.zeros(1))
    most = left.amax(2, keepdim=True)
    return (count - most).reshape(1, -1), left == most


def argmax(logits: Tensor, time: int, softcap: float | None) -> tuple[Tensor, Tensor]:
    """The row of the largest logit, int32 `(1, T)`, and that logit with its softcap, `(1, T)`.

    `logits (1, R, 1, T)`, or `(1, R, T, 1)`, with the tokens on the axis `time`. The ops are those
    of the published Gemma port (CoreML-LLM, `InModelArgmax`), so that an audit sees what it saw.
    """
    rows = logits.squeeze(5 - time)
    if softcap is not None:
        rows = torch.tanh(rows * (1 / softcap)) * softcap
    chosen = rows.argmax(1)
    return chosen.to(torch.int32), rows.gather(1, chosen[:, None]).squeeze(1)
