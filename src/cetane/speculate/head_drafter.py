"""Draft heads at work: they read what the target's calls hand on."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cetane.bundle import Bundle
from cetane.engine.backend import Array
from cetane.engine.engine import Session
from cetane.engine.verify import NO_DRAFT, Draft
from cetane.errors import CetaneError
from cetane.speculate.drafter import Drafter
from cetane.speculate.features import Taps, tapped
from cetane.speculate.heads import Eagle3, Head, KeysValues, Medusa


class HeadDrafter(Drafter):
    """Keeps the hidden states of the sequence for a head."""

    costly = True

    def __init__(self, head: Head, bundle: Bundle) -> None:
        if head.config.bundle != bundle.digest or head.config.hidden != bundle.plan.hidden:
            raise CetaneError(
                f"the head was trained for another bundle than {bundle.path}",
                "cetane train-head makes one",
            )
        super().__init__()
        self.head, self.shards = head, tapped(bundle.plan)
        self.embedding = torch.from_numpy(np.array(bundle.tables().embedding))

    def begin(self, session: Session, tokens: Sequence[int]) -> None:
        if session is not self.session:
            self.taps = Taps(session, self.shards)
        super().begin(session, tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        super().extend(tokens)
        self.see(self.taps.take())

    def see(self, features: Array) -> None:
        """The hidden states `(n, 3, C)` of the tokens that were accepted last."""
        raise NotImplementedError


class MedusaDrafter(HeadDrafter):
    name = "medusa"
    head: Medusa

    def forget(self) -> None:
        self.last: Tensor | None = None

    def see(self, features: Array) -> None:
        if len(features):
            self.last = torch.from_numpy(features[-1, -1])

    @torch.inference_mode()
    def propose(self, most: int) -> Draft:
        if self.last is None:
            return NO_DRAFT
        return Draft(tuple(self.head.draft(self.last, most)), self.name)


class Eagle3Drafter(HeadDrafter):
    """Runs its layer over what is certain when it is asked, then over its own tokens, whose keys
    and values are not kept."""

    name = "eagle3"
    head: Eagle3

    def forget(self) -> None:
        self.waiting: list[Array] = []
        self.past: KeysValues | None = None
        self.done = 0
        """Positions that the layer has seen."""

    def see(self, features: Array) -> None:
        self.waiting.append(features)

    @torch.inference_mode()
    def propose(self, most: int) -> Draft:
        features = np.concatenate(self.waiting)
        after = self.tokens[self.done + 1 : self.done + 1 + len(features)]
        if not len(features) or len(after) < len(features):
            return NO_DRAFT
        embedded = self.embedding[after].float()
        h, self.past = self.head.follow(torch.from_numpy(features), embedded, self.past)
        self.done += len(features)
        self.waiting = []
        return Draft(tuple(self.head.draft(h, self.past, self.embedding, most)), self.name)


def head_drafter(head: Head, bundle: Bundle) -> HeadDrafter:
    """The drafter of a head."""
    return (MedusaDrafter if head.config.kind == "medusa" else Eagle3Drafter)(head, bundle)
