"""The slots of a cache group: their number, and who writes them."""

from typing import Literal, Self

from pydantic import Field

from cetane.validation import Data

ContractName = Literal["readonly", "blend", "shift", "stateful", "stateful-blend", "stateful-shift"]
CONTRACTS: tuple[ContractName, ...] = ("readonly", "blend", "shift", "stateful")
"""The contracts to choose from. The others write a state as the published ports did."""
CacheFormat = Literal["fp16", "int8"]


class Slots(Data):
    """The number of slots that all caches of a group have, and the contract that writes them.

    With `shift` and `stateful-shift` the newest token is on the right. With the other contracts a
    token keeps its slot. The first `sinks` tokens of a sequence keep theirs for ever; the others
    share the rest in turn.
    """

    contract: ContractName
    count: int = Field(ge=1, le=2**24)
    sinks: int = Field(default=0, ge=0)
    limited: bool = False
    """Whether there are fewer slots than the context, so that slots are used again."""

    @property
    def in_state(self) -> bool:
        """Whether Core ML keeps the caches, in a state, and the graph writes them."""
        return self.contract.startswith("stateful")

    @property
    def shifts(self) -> bool:
        """Whether a call pushes the oldest columns out, on the left."""
        return self.contract in ("shift", "stateful-shift")

    @property
    def writes_padding(self) -> bool:
        """Whether a graph writes all columns of a call, since it cannot tell its padding."""
        return self.shifts or self.contract == "stateful"

    @property
    def forgets(self) -> bool:
        """Whether a state's slots are used again: nobody can go back to its earlier tokens."""
        return self.in_state and (self.limited or self.shifts)

    def at(self, capacity: int) -> Self:
        """The slots of the group at a smaller capacity, in tokens. A window keeps its own."""
        return self if self.limited else self.model_copy(update={"count": capacity})

    def contract_for(self, tokens: int) -> ContractName:
        """The contract of a call of `tokens` tokens.

        Where slots are used again, a call of several tokens is `readonly`: it returns its columns,
        and the host writes those of accepted tokens. If the graph wrote them, its last column would
        replace a key that its first token still sees. A refused draft would then destroy that key.
        A state has no such contract; it is longer instead, by the tokens of its widest call.
        """
        host_writes = self.limited and tokens > 1 and self.contract in ("shift", "blend")
        return "readonly" if host_writes else self.contract

    def visible(self, tokens: int) -> int:
        """The number of keys in each mask row of a call of `tokens` tokens."""
        return self.count + tokens if self.contract_for(tokens) == "readonly" else self.count

    def pads(self, tokens: int) -> bool:
        """Whether a call of `tokens` columns may hold fewer tokens, and padding in the rest."""
        return self.contract_for(tokens) not in ("shift", "stateful-shift")

    def of(self, position: int) -> int:
        """The slot of a position, for every contract that does not shift."""
        if position < self.sinks:
            return position
        return self.sinks + (position - self.sinks) % (self.count - self.sinks)


PADDED = "padded_kv"
"""The name of the state that all groups of a package share, if the recipe pads them."""
