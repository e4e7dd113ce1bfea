"""The slots of a cache group: how many there are, and who writes them."""

from typing import Literal, get_args

from pydantic import Field

from cetane.validation import Data

ContractName = Literal["readonly", "blend", "shift", "stateful"]
CONTRACTS: tuple[ContractName, ...] = get_args(ContractName)


class Slots(Data):
    """What all caches of a group have in common: how many slots, and how they are written.

    With `shift` the newest token is on the right. With the others a token has its slot: the first
    `sinks` of a sequence for ever, the others in turn.
    """

    contract: ContractName
    count: int = Field(ge=1, le=2**24)
    sinks: int = Field(default=0, ge=0)
    limited: bool = False
    """Fewer than the context: a slot is used again."""

    def form(self, tokens: int) -> ContractName:
        """The contract of a call of `tokens` tokens.

        Where slots are used again, a call of several tokens is `readonly`: it returns its columns,
        and the host writes those that count. Written by the graph, the last column would replace
        what the first token still sees, and a refused draft would have destroyed it. A state is
        longer instead, by as much as its widest call.
        """
        read = self.limited and tokens > 1 and self.contract in ("shift", "blend")
        return "readonly" if read else self.contract

    def visible(self, tokens: int) -> int:
        """The keys that each mask row of a call of `tokens` tokens covers."""
        return self.count + tokens if self.form(tokens) == "readonly" else self.count

    def pads(self, tokens: int) -> bool:
        """Whether a call of `tokens` columns may carry fewer tokens, the rest being padding."""
        return self.form(tokens) != "shift"

    def of(self, position: int) -> int:
        """The slot of a position, unless columns shift."""
        if position < self.sinks:
            return position
        return self.sinks + (position - self.sinks) % (self.count - self.sinks)


PADDED = "padded_kv"
"""The one state of a package whose groups share it."""
