"""What errors of a weight count: the mean square of the input that each column multiplies.

A projection errs by Σ (error of a weight · its input), so where errors are independent the mean
square of its output's error is Σ error² · mean(input²): the diagonal of the Hessian that GPTQ and
Optimal Brain Surgeon use, here as weights of k-means. One number an input channel, found by running
a text: no backward pass, and a file of some hundred kilobytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field, PrivateAttr

from cetane.errors import CetaneError
from cetane.files import read_bytes
from cetane.validation import Data

if TYPE_CHECKING:  # a recipe is read without numpy
    import numpy as np
    import numpy.typing as npt

    Vector = npt.NDArray[np.float32]

KEY = "key"
"""Of the metadata that says what a file depends on."""
LARGEST = 1 << 28
"""Bytes of a file that is read."""


class Sensitivities:
    """Mean squares of inputs, fp32 `(I,)`, by the canonical name of the weight that they meet."""

    def __init__(self, inputs: Mapping[str, Vector]) -> None:
        self.inputs = dict(inputs)

    def of(
        self, name: str, shape: tuple[int, ...], columns: tuple[int, int] | None = None
    ) -> Vector:
        """What a squared error of a weight's elements counts, `(1, I, 1, ...)` for a weight of
        `shape (O, I, ...)`; `columns` are the inputs that it has of the named one's.

        CetaneError if there is none of this name, or for another number of inputs.
        """
        inputs = self.inputs.get(name)
        if inputs is None:
            raise CetaneError(f"no sensitivities of {name}", "they are of another model")
        part = inputs[slice(*columns)] if columns else inputs
        if len(shape) < 2 or part.shape != (shape[1],):
            raise CetaneError(
                f"{name} has shape {shape}, but sensitivities of {len(part)} inputs",
                "they are of another model",
            )
        return part.reshape(1, -1, *[1] * (len(shape) - 2))

    def save(self, path: Path, key: str = "") -> str:
        """Write a safetensors file, and into it what they depend on; returns its SHA-256."""
        from safetensors.numpy import save  # here: recipes are read without it

        content = save(self.inputs, {KEY: key})
        path.write_bytes(content)
        return hashlib.sha256(content).hexdigest()


def written_for(path: Path) -> str | None:
    """What the sensitivities in a file depend on; None for any other file, or none."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np") as file:
            return (file.metadata() or {}).get(KEY)
    except (OSError, SafetensorError):
        return None


class SensitivityFile(Data):
    """A recipe's `[compression.sensitivity]`: a safetensors file beside the recipe, and its hash,
    so that a recipe says what it makes whatever a folder holds."""

    file: str = Field(min_length=1)
    sha256: str = Field(pattern="[0-9a-f]{64}")
    _folder: Path = PrivateAttr(default_factory=Path)

    def __eq__(self, other: object) -> bool:
        """Wherever it lies: a bundle's recipe does not know."""
        return isinstance(other, SensitivityFile) and self.sha256 == other.sha256

    def __hash__(self) -> int:
        return hash(self.sha256)

    def beside(self, recipe: Path) -> None:
        """Let the file be looked for where a recipe lies."""
        self._folder = recipe.parent

    def read(self) -> Sensitivities:
        """CetaneError for a file that is not there, is another, or holds anything else."""
        from safetensors import SafetensorError
        from safetensors.numpy import load

        path = self._folder / self.file
        try:
            content = read_bytes(path, LARGEST)
        except CetaneError as error:
            raise CetaneError(
                f"compression.sensitivity: {error.message}", "cetane sweep MODEL writes it"
            ) from error
        if hashlib.sha256(content).hexdigest() != self.sha256:
            raise CetaneError(
                f"compression.sensitivity: {path} is not the file that the recipe was written for",
                "cetane sweep MODEL writes both",
            )
        try:
            inputs = load(content)
        except (SafetensorError, ValueError, KeyError) as error:
            raise CetaneError(f"{path}: no safetensors file: {error}") from error
        if any(v.dtype != "float32" or v.ndim != 1 for v in inputs.values()):
            raise CetaneError(f"{path}: holds something else than vectors of fp32")
        return Sensitivities(inputs)
