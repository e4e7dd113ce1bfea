"""Sizes of a model under a sweep's compressions, in bytes."""

from functools import cached_property

from cetane.compress import Selection
from cetane.planner import Planner
from cetane.planner.weights import format_of, weight_count
from cetane.sweeps.candidates import candidate_of, weights
from cetane.sweeps.grid import parse_way


class Sizes:
    """Bytes of the weights that formats are for, and of what every point has beside them."""

    def __init__(self, planner: Planner) -> None:
        """`planner` is that of the sweep's recipe."""
        self.planner = planner
        self.weights = tuple(weights(planner))
        self.elements = sum(weight.elements for weight in self.weights)

    def of(self, selection: Selection) -> int:
        """Bytes of the weights that formats are for."""
        return sum(format_of(weight, selection).nbytes(weight.shape) for weight in self.weights)

    def of_way(self, name: str) -> int:
        """Bytes of these weights, all in one format."""
        return self.of(candidate_of(parse_way(name), self.planner, None).selection)

    @cached_property
    def rest(self) -> int:
        """Bytes of the weights that always stay in fp16: gains and biases."""
        return 2 * (weight_count(self.planner.blocks) - self.elements)

    @cached_property
    def tables(self) -> int:
        """Bytes of the host's tables, in the recipe's format."""
        return self.planner.plan().embedding_bytes

    @property
    def beside(self) -> int:
        """Bytes that every point has beside the weights that formats are for."""
        return self.rest + self.tables
