"""The reference executor: runs a function on torch, op by op.

"fp32" precision computes in float32 and rounds nothing. In "fp16" precision, every value that the
program types as fp16 holds float16 numbers. Each op computes in float32 or wider from start to end,
sums included. Its result is rounded once: to nearest, ties to even, overflow to infinity. For fp16
inputs, these results are

- exact, equal to numpy's in float16 and to rounded real arithmetic: moves, comparisons, `select`,
  `add`, `sub`, `mul`, `real_div`, `floor_div`, `mod`, `maximum`, `minimum`, `clip`, `relu`, `abs`,
  `sign`, `floor`, `ceil`, `round`, `square`, `sqrt`, `rsqrt`, `inverse`, `reduce_max`,
  `reduce_min`, and `cast`. The sign of a zero is left open for `floor_div`, `mod`, `relu`, and the
  largest and smallest of zeros;
- at most 1 ulp off, for every float16: `exp`, `log`, `erf`, trigonometric and hyperbolic functions,
  `sigmoid`, `silu`, `gelu`, `softplus`, `softsign`, `elu`;
- off by at most n * 2**-24 * sum(|terms|) before rounding, as any float32 sum, for a sum of n terms
  (`reduce_sum`, `matmul`, `conv`, `softmax`, `layer_norm`, ...). Without cancellation this is 1
  ulp. torch decides the order of the terms.

Apple does not publish how an ANE computes inside an op. It stores fp16 between ops, and "fp16"
reproduces that. `tests/mil/test_precision.py` compares all of this with numpy. "ane" precision adds
what explains the errors that were published for attention on an ANE: see `ane.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cetane.errors import CetaneError
from cetane.mil.bind import BUDGET, BodyBudget, BoundBody, Decoded, Environment, Watch, bind
from cetane.mil.dtypes import NUMPY, kind
from cetane.mil.ops.registry import StateCell
from cetane.mil.program import MilFunction, Precision, TensorType
from cetane.mil.storage import STORAGE, from_numpy, halves

SHARED = 2**20
"""Elements. A function with a result of this size uses all of torch's threads; others use one.

For smaller results, two threads gain nothing on an idle machine: a step of 35 narrow layers takes
62 ms either way. Beside two busy processes, two threads wait for each other: the step takes 575 ms,
and 95 ms with one thread."""


@dataclass
class TensorState:
    """The states of a function between calls, by name: float32 or integer torch tensors."""

    tensors: dict[str, Tensor]

    def copy(self) -> TensorState:
        """An independent copy, to return to later."""
        return TensorState({name: tensor.clone() for name, tensor in self.tensors.items()})

    def read_state(self, name: str) -> npt.NDArray[Any]:
        """A copy of a state."""
        array: npt.NDArray[Any] = self.tensors[name].clone().numpy()
        return array

    def write_state(self, name: str, value: npt.NDArray[Any]) -> None:
        """Replace the values of a state."""
        self.tensors[name] = torch.tensor(value, dtype=self.tensors[name].dtype)


class Executable:
    """A function with its constants decoded and its ops bound, ready to run."""

    def __init__(
        self, function: MilFunction, precision: Precision = "fp32", decoded: Decoded | None = None
    ) -> None:
        """ "fp32" rounds nothing. "fp16" computes in float32, and rounds each result that the
        program types as fp16: a machine with fp16 storage and fp32 accumulation. "ane" does so too,
        and multiplies computed matrices as an ANE was seen to (`mil/ane.py`).

        `decoded` is a dict, empty at first: functions of one program that get the same one share
        their weights. Raises CetaneError that lists every kind of op without an implementation.
        """
        if precision not in get_args(Precision):
            known = ", ".join(f'"{name}"' for name in get_args(Precision))
            raise CetaneError(f"precision {precision!r} is not known: it is one of {known}")
        self.function = function
        self.precision = precision
        self._rounds = precision != "fp32"
        self._shared = largest_result(function) >= SHARED
        with torch.no_grad():
            self._body: BoundBody = bind(function, precision, {} if decoded is None else decoded)

    def make_state(self) -> TensorState:
        """The function's states, all zeros."""
        types = self.function.states
        shapes = self.function.state_shapes()
        return TensorState(
            {name: torch.zeros(s, dtype=STORAGE[types[name].dtype]) for name, s in shapes.items()}
        )

    def __call__(
        self,
        inputs: Mapping[str, npt.NDArray[Any]],
        state: TensorState | None = None,
        watch: Watch | None = None,
    ) -> dict[str, Any]:
        """Run once: arrays by input name in, arrays by output name out; updates `state`.

        Float inputs may have any float type, and are rounded to the declared one. Float outputs are
        float32; in "fp16" precision, float16 where the program declares it. A classifier's class is
        a str or an int, its probabilities are a dict. `watch` gets the name and value of every
        result, and may return another value in its place. Raises CetaneError that names the input
        that does not fit, or the op that fails.
        """
        with torch.no_grad(), threads(torch.get_num_threads() if self._shared else 1):
            environment: Environment = {BUDGET: BodyBudget(), **self._states(state)}
            environment.update(self._inputs(inputs))
            results = self._body.run(environment, watch)
            types = self.function.outputs
            return {
                name: self._output(value, types[name]) if isinstance(value, Tensor) else value
                for name, value in zip(self._body.outputs, results, strict=True)
            }

    def _states(self, state: TensorState | None) -> Environment:
        tensors = {} if state is None else state.tensors
        self.function.check_states({name: tuple(t.shape) for name, t in tensors.items()})
        return {name: StateCell(tensors, name) for name in tensors}

    def _inputs(self, inputs: Mapping[str, npt.NDArray[Any]]) -> dict[str, Tensor]:
        expected = self.function.inputs
        self.function.check_inputs(inputs)
        return {name: self._input(name, inputs[name], expected[name]) for name in inputs}

    def _input(self, name: str, array: npt.NDArray[Any], type_: TensorType) -> Tensor:
        array = np.asarray(array)
        if not type_.accepts_array(array.dtype, array.shape):
            raise CetaneError(f"input {name}: expected {type_}, got {array.dtype} {array.shape}")
        rounds = self._rounds and type_.dtype == "fp16"
        tensor = from_numpy(halves(array) if rounds else array, type_.dtype)
        if kind(array.dtype) == "int" and not np.array_equal(tensor.numpy(), array):
            raise CetaneError(f"input {name}: has values that do not fit {type_.dtype}")
        return tensor

    def _output(self, value: Tensor, type_: TensorType) -> npt.NDArray[Any]:
        unrounded = type_.dtype == "fp16" and not self._rounds
        return np.array(value.numpy(), np.float32 if unrounded else NUMPY[type_.dtype])


def largest_result(function: MilFunction) -> int:
    """The elements of the largest tensor that a call computes; flexible axes count as 1."""
    shapes = [
        value.type.shape
        for op in function.ops
        if not op.kind.startswith("const")
        for value in op.outputs
        if value.type is not None
    ]
    return max((prod(n for n in shape if isinstance(n, int)) for shape in shapes), default=0)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """A context in which torch's ops use `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
