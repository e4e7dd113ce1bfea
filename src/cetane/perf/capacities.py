"""The predicted price of every capacity of a plan: its decode steps, and the way up to the next."""

from dataclasses import dataclass

from cetane.perf.predict import Prediction, Predictor
from cetane.planner import Planner


@dataclass(frozen=True)
class CapacityCost:
    """One capacity, in milliseconds; nothing here is measured."""

    decode: Prediction
    functions: int
    """Functions made for it alone; blocks without a growing cache use the context's functions."""
    crossing: float
    """The copy of all caches into the next capacity; 0 for the context. Its rate is that of tensors
    that cross a program's border: the slowest at which a host was seen to move bytes."""
    saved: float
    """What a step saves against a step at the context."""

    @property
    def tokens(self) -> int:
        return self.decode.context

    @property
    def break_even(self) -> float | None:
        """The decoded tokens after which it has paid for its crossing; None if it saves nothing."""
        return self.crossing / self.saved if self.saved > 0 else None


def capacity_costs(predictor: Predictor, planner: Planner) -> list[CapacityCost]:
    """The price of every capacity, ascending; only the context's for a plan without others."""
    context = planner.recipe.cache.context
    sizes = [*planner.smaller, context]
    largest = predictor.predict(planner, "decode", context)
    own = [graph.function.capacity for shard in planner.members for graph in planner.graphs(shard)]
    byte = predictor.costs["border"]
    costs = []
    for size, after in zip(sizes, [*sizes[1:], None], strict=True):
        decode = largest if after is None else predictor.predict(planner, "decode", size)
        moved = 0 if after is None else sum(map(planner.memory.growing_nbytes, (size, after)))
        costs.append(
            CapacityCost(
                decode=decode,
                functions=own.count(None if after is None else size),
                crossing=moved * byte,
                saved=largest.ms - decode.ms,
            )
        )
    return costs
