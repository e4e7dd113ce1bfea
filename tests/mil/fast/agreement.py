"""What tests of the rewrites share."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from cetane.mil import MilFunction, load
from cetane.mil.executor import Executable
from cetane.mil.fast import FastProgram
from cetane.mil.fast.attention_stage import AttentionStage
from cetane.mil.fast.fusion import fuse
from cetane.mil.fast.stages import stages
from cetane.mil.fast.tape.model import TapeModel
from cetane.mil.fast.translate import translate

Build = Callable[..., Path]

rng = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def kinds(function: MilFunction) -> list[str]:
    """Nodes of the graphs that the function becomes, and "Attention" for what runs between them."""
    names: list[str] = []
    for stage in stages(fuse(function)):
        if isinstance(stage, AttentionStage):
            names.append("Attention")
        else:
            names += [node.kind for node in translate(stage).nodes]
    return names


def agree(path: Path, pack: bool = False, **inputs: np.ndarray) -> list[np.ndarray]:
    """Outputs of the fast executor, equal to those of the reference. With `pack` it may be a
    tape."""
    return _agree(FastProgram(load(path), pack), rtol=1e-5, **inputs)


def tape_agrees(path: Path, rtol: float = 1e-5, **inputs: np.ndarray) -> list[np.ndarray]:
    """Outputs of a function that must run as a tape, equal to those of the reference."""
    program = FastProgram(load(path), pack=True)
    assert isinstance(program.shared("main"), TapeModel)
    return _agree(program, rtol, **inputs)


def _agree(program: FastProgram, rtol: float, **inputs: np.ndarray) -> list[np.ndarray]:
    fast = program.function("main")(inputs)
    exact = Executable(program.program.functions["main"], "fp32")(inputs)
    assert list(fast) == list(exact)
    for name in exact:
        np.testing.assert_allclose(fast[name], exact[name], rtol=rtol, atol=1e-6)
    return list(fast.values())
