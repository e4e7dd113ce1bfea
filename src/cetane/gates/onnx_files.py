"""The gate of ONNX files: in plain onnxruntime, each must give what its function gives.

The bundle's gates judge programs. A file is another form of one, with weights at other places. So
the exact executor, which shares no code with these files, runs the program beside it.
"""

from collections.abc import Mapping
from math import inf
from pathlib import Path

import numpy as np
import torch

from cetane.errors import CetaneError
from cetane.gates.verdict import Check, at_most
from cetane.mil.bind import Decoded
from cetane.mil.dtypes import Array
from cetane.mil.executor import Executable, TensorState
from cetane.mil.fast.sessions import open_session
from cetane.mil.gap import gap
from cetane.mil.inputs import random_inputs
from cetane.mil.program import MilFunction, Program

MOST = 1e-2
"""The largest relative error of a right file, where only the order of sums differs. Random inputs
enlarge that: zaya-tiny errs by 4e-5, and SmolLM2-135M by 1.2e-4. A wrong weight errs by more."""
DRAWS = 3
"""How many random inputs a function gets until its file is right. Near a tie of experts, the order
of sums alone may choose the other one; two such ties in turn are rare."""


def judge_onnx(
    package: str, program: Program, files: Mapping[str, Path]
) -> tuple[list[Check], list[str]]:
    """The check of the function that errs most, of a package's files by the names of functions.

    Also returns, in words, what was not judged: functions that refuse random inputs."""
    decoded: Decoded = {}
    errors, unjudged = dict[str, float](), list[str]()
    for name, file in files.items():
        try:
            errors[name] = least_error(program.functions[name], file, decoded)
        except CetaneError as error:
            unjudged.append(f"{package}/{name}: {error.message}")
    worst = max(errors, key=errors.__getitem__, default=None)
    if worst is None:
        return [], unjudged
    return [at_most(f"{package}: error of {worst}", errors[worst], MOST)], unjudged


def least_error(function: MilFunction, file: Path, decoded: Decoded) -> float:
    """The least error of a file over `DRAWS` random inputs; those behind a right one are left out.

    An error is that of the worst output: norm of the difference over norm of the truth; infinite
    where onnxruntime fails. CetaneError where the exact executor fails."""
    exact, session = Executable(function, "fp32", decoded), open_session(str(file))
    names, errors = [output.name for output in session.get_outputs()], list[float]()
    for seed in range(DRAWS):
        given, state = drawn(function, seed)
        feeds = given | {name: tensor.numpy().copy() for name, tensor in state.tensors.items()}
        truth = exact(given, state)
        truth |= {f"{name}_out": tensor.numpy() for name, tensor in state.tensors.items()}
        try:
            found = dict(zip(names, session.run(None, feeds), strict=True))
        except Exception:  # onnxruntime's exceptions have no common base
            return inf
        errors.append(max(gap(truth[name], found[name]).relative for name in truth))
        if errors[-1] <= MOST:
            break
    return min(errors)


def drawn(function: MilFunction, seed: int) -> tuple[dict[str, Array], TensorState]:
    """Random inputs and states of a function. Floats are fp32, as in the files."""
    given = {
        name: array.astype(np.float32) if array.dtype.kind == "f" else array
        for name, array in random_inputs(function, seed).items()
    }
    random = torch.Generator().manual_seed(seed)
    shapes = function.state_shapes().items()
    return given, TensorState({name: torch.randn(s, generator=random) for name, s in shapes})
