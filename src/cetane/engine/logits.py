"""Logits over the whole vocabulary, collected from the slices of a head."""

import numpy as np

from cetane.engine.backend import Array
from cetane.errors import CetaneError
from cetane.schema.interface import MASKED, ToChoice, ToLogits
from cetane.schema.plan import Plan

PORT_AGAIN = "port the model again"


class HeadRows:
    """The token of each row of a plan's head, and the softcap of its logits."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.unseen = np.full(plan.vocab, -np.inf, np.float32)
        """The initial logits `(V,)`. A token without a row keeps minus infinity, so it is never
        chosen. A head that only chooses leaves its other tokens at a finite, very low value."""
        self.unseen[plan.choosable] = MASKED

    def capped(self, logits: Array) -> Array:
        """Logits in fp32, with the model's softcap."""
        plain: Array = logits.astype(np.float32, copy=False)
        cap = self.plan.softcap
        return plain if cap is None else cap * np.tanh(plain / cap)


class Logits:
    """The logits of one call of `count` tokens, collected from outputs of the head."""

    def __init__(self, head: HeadRows, count: int) -> None:
        self.head, self.count = head, count
        self.rows: Array | None = None
        """The logits, fp32 `(count, V)`; None until a head has run."""
        self.chosen: Array | None = None
        """The token that the last slice of the head chose for each token of the call."""
        self.outside: Array
        """Whether that slice chose none of its rows, bool `(count,)`."""

    def add(self, sink: ToLogits | ToChoice, value: Array) -> None:
        """Add an output of the head for T >= `count` tokens. It holds logits `(1, rows, 1, T)` or
        `(1, rows, T, 1)`, a choice's row `(2, T)`, or a choice's logit `(1, T)`.

        Raises CetaneError for a choice outside its rows, unless its logit is infinity or NaN: among
        NaN, no row is the largest.
        """
        head, count = self.head, self.count
        if self.rows is None:
            self.rows = np.tile(head.unseen, (count, 1))
        if isinstance(sink, ToLogits):
            slices = value.reshape(value.shape[1], -1)[:, :count].T
            self.rows[:, head.plan.tokens(sink.start, sink.stop)] = head.capped(slices)
        elif sink.part == "row":
            rows = sink.block * value[0, :count] + value[1:, :count].sum(0)
            self.outside = ~((rows >= 0) & (rows < sink.stop - sink.start))
            rows = np.where(self.outside, 0, rows).astype(int)
            self.chosen = head.plan.choosable[sink.start + rows]
        else:
            logits = head.capped(value.reshape(-1)[:count])
            if (self.outside & np.isfinite(logits)).any():
                raise CetaneError("the head chose a row that it does not have", PORT_AGAIN)
            self.rows[np.arange(count), self.chosen] = logits
