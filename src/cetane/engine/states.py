"""The MLStates of a sequence: made when a call needs them, and copied to the next capacity."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf

from cetane.engine.backend import Arrays, States
from cetane.engine.shards import OpenShards
from cetane.engine.slots import grown
from cetane.errors import CetaneError
from cetane.mil.guard import reason
from cetane.schema.function import Function


class OwnedStates:
    """The MLStates of one owner in one sequence: one for each capacity that it has reached.

    After its contents were copied, a smaller one stays for a session that rewinds to an earlier
    mark. Slots that were written after the mark do no harm: no mask shows a slot before it is
    written again.
    """

    def __init__(self, shards: OpenShards, shard: str) -> None:
        self.shards, self.shard = shards, shard
        self.made: dict[float, States] = {}
        self.taken: dict[float, Arrays] = {}
        """Contents of another sequence's states, until a call needs these states."""
        self.last: Function | None = None
        """The function of the last call."""

    def of(self, function: Function) -> States:
        """The states for a function. The contents of smaller ones are copied into them first."""
        size, last = state_capacity(function), self.last
        if size not in self.made:
            self.made[size] = self.shards.make_state(self.shard, function)
            if size in self.taken:
                write_states(function, self.taken.pop(size), self.made[size])
        if last is not None and state_capacity(last) < size:
            write_states(function, self._held(last), self.made[size])
        self.last = function
        return self.made[size]

    def copied(self, shards: OpenShards) -> "OwnedStates":
        """The states of a sequence that goes on from here, whose shards may not be open yet."""
        copy = OwnedStates(shards, self.shard)
        copy.last = self.last
        if self.last is not None:
            read = {size: read_states(self.last, states) for size, states in self.made.items()}
            copy.taken = {**self.taken, **read}
        return copy

    def _held(self, function: Function) -> Arrays:
        """The contents of the states of a function that ran here, or in the taken sequence."""
        size = state_capacity(function)
        return self.taken[size] if size in self.taken else read_states(function, self.made[size])


def read_states(function: Function, source: States) -> Arrays:
    """The contents of the states of a function's owner, by name. CetaneError if Core ML refuses."""
    with copy_errors(function):
        return {state.name: source.read_state(state.name) for state in function.states}


def write_states(function: Function, held: Arrays, target: States) -> None:
    """Write contents into the first slots of states that were made for `function`, and are as large
    or larger. CetaneError if Core ML refuses."""
    with copy_errors(function):
        for state in function.states:
            value = grown(held[state.name], "stateful", state.shape[-1], 0)
            target.write_state(state.name, value)


@contextmanager
def copy_errors(function: Function) -> Iterator[None]:
    """A context that raises CetaneError where Core ML cannot copy the states of a function."""
    try:
        yield
    except RuntimeError as error:  # Core ML's
        raise CetaneError(
            f"the states of {function.owner} cannot be copied: {reason(error)}",
            "port with --set cache.contract=readonly, or with --set 'cache.capacities=[]'",
        ) from error


def state_capacity(function: Function) -> float:
    """The tokens that a function's states hold; infinity for the whole context."""
    return inf if function.capacity is None else function.capacity
