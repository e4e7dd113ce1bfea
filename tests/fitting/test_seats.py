"""Weights stand in a transformers model where their family reads them, and learn there."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import InMemoryCheckpoint
from tests.fitting.test_experts import FORM as MIXTURE_FORM
from tests.fitting.test_experts import MODELS as MIXTURES
from tests.fitting.test_experts import Case as Mixture
from tests.fitting.test_picked_rows import FORM as ORDER_FORM
from tests.fitting.test_picked_rows import MODELS as IN_ANOTHER_ORDER
from tests.fitting.test_picked_rows import Case as InAnotherOrder

from cetane.compress.encoded import Dense
from cetane.files import silent
from cetane.fitting.seats import Seat, seats_in
from cetane.fitting.teacher import ask
from cetane.fitting.tunable import tunable
from cetane.fitting.tune import Student
from cetane.gates.transformers_model import stored_names

MODELS = [*IN_ANOTHER_ORDER, *(f"{name}, experts" for name in MIXTURES)]


class Case:
    """A random model, and the seats of its matrices that are no whole tensors."""

    def __init__(self, name: str, together: int = 1) -> None:
        made: Any
        if name.endswith(", experts"):
            made = Mixture(name.removesuffix(", experts"), together)
            self.parts, self.form = made.experts, MIXTURE_FORM
        else:
            made = InAnotherOrder(name)
            self.parts, self.form = made.weights, ORDER_FORM
        self.model = made.model
        stored = stored_names(self.model, self.model.config)
        names = {path: own["weight"] for path, own in stored.items() if "weight" in own}
        self.seats = seats_in(self.model, names, stored, self.parts, self.parts)

    def read(self, matrix: str) -> np.ndarray:
        """A matrix as its family reads it from the model."""
        values: np.ndarray = self.parts[matrix].read(InMemoryCheckpoint(self.model)).numpy()
        return values


CASES = [(name, 1) for name in MODELS] + [("mixtral, experts", 2), ("gpt_oss, experts", 2)]


@pytest.mark.parametrize(("name", "together"), CASES)
def test_a_family_reads_what_is_written(name: str, together: int) -> None:
    """And what a seat reads is what its family does."""
    case = Case(name, together)
    assert case.seats.keys() == case.parts.keys() != set()
    wanted = {}
    for number, (matrix, seat) in enumerate(case.seats.items()):
        stored = seat.stored(InMemoryCheckpoint(case.model)).numpy()
        np.testing.assert_array_equal(seat.read(seat.parameter), stored)
        wanted[matrix] = np.random.default_rng(number).normal(size=stored.shape)
        seat.write(torch.from_numpy(wanted[matrix]))
    for matrix, part in case.parts.items():
        expected = wanted[matrix].astype(np.float32) * np.float32(part.factor)
        np.testing.assert_array_equal(case.read(matrix), expected)


def test_a_whole_layer() -> None:
    layer = torch.nn.Linear(3, 2)
    seat = Seat("layer.weight", layer.weight)
    seat.write(torch.arange(6.0).reshape(2, 3))
    assert torch.equal(seat.read(layer.weight), torch.arange(6.0).reshape(2, 3))


@pytest.mark.parametrize(("name", "together"), CASES)
def test_a_student_moves_each_weight_against_its_own_gradient(name: str, together: int) -> None:
    """The gradients of all seats are those that torch gives for the parameters."""
    case = Case(name, together)
    tokens = torch.randint(0, 288, (2, 12), generator=torch.Generator().manual_seed(0))
    answers = ask(case.model, tokens, 2, silent)
    weights = {}
    for matrix, seat in case.seats.items():
        made = case.form.encode(seat.read(seat.parameter).numpy())
        assert not isinstance(made, Dense)
        weights[matrix] = tunable(made, seat.read(seat.parameter).clone())
    student = Student(case.model, case.seats, weights)
    given: dict[str, Any] = {}
    for matrix, weight in weights.items():
        weight.step = lambda gradient, *_, own=matrix: given.update({own: gradient})  # type: ignore
    student.divergence(answers).backward()
    gradients = {seat.name: seat.parameter.grad.clone() for seat in case.seats.values()}
    student.step(1.0, 1)
    source = InMemoryCheckpoint(case.model)
    source.tensors = gradients
    for matrix, seat in case.seats.items():
        assert torch.equal(given[matrix], seat.stored(source).float())
    assert any(gradient.abs().max() > 0 for gradient in given.values())
    assert all(parameter.grad is None for parameter in student.parameters)
