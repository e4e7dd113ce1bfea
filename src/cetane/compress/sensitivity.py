"""Sensitivities: how much an error in each column of a weight disturbs the layer's output.

The sensitivity of a column is the mean square of the input that it multiplies, measured over a
text. The output's error is Σ (error of a weight · its input). If these errors are independent, its
mean square is Σ error² · mean(input²). These means are the diagonal of the Hessian that GPTQ and
Optimal Brain Surgeon use; here they weight k-means. There is one number for each input channel. No
backward pass is needed, and the file has some hundred kilobytes.
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
"""The metadata entry that names the model and the text of a file."""
LARGEST = 1 << 28
"""The largest file that is read, in bytes."""


class Sensitivities:
    """Mean squares of inputs, fp32 `(I,)`, by the canonical name of the weight that reads them."""

    def __init__(self, inputs: Mapping[str, Vector]) -> None:
        self.inputs = dict(inputs)

    def of(
        self, name: str, shape: tuple[int, ...], columns: tuple[int, int] | None = None
    ) -> Vector:
        """The factors for the squared errors of a weight, `(1, I, 1, ...)` for shape `(O, I, ...)`.

        `columns` is the range of the named weight's inputs that this weight has; by default all.
        Raises CetaneError for an unknown name, or for another number of inputs.
        """
        inputs = self.inputs.get(name)
        if inputs is None:
            raise CetaneError(
                f"no sensitivities of {name}", "use those of this model: cetane sweep"
            )
        part = inputs[slice(*columns)] if columns else inputs
        if len(shape) < 2 or part.shape != (shape[1],):
            raise CetaneError(
                f"{name} has shape {shape}, but its sensitivities have {len(part)} inputs",
                "use those of this model: cetane sweep",
            )
        return part.reshape(1, -1, *[1] * (len(shape) - 2))

    def save(self, path: Path, key: str = "") -> str:
        """Write a safetensors file; returns its SHA-256. `key` names the model and the text."""
        from safetensors.numpy import save  # here: recipes are read without it

        content = save(self.inputs, {KEY: key})
        path.write_bytes(content)
        return hashlib.sha256(content).hexdigest()


def stored_key(path: Path) -> str | None:
    """The key that `Sensitivities.save` wrote into a file. None for a missing or other file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np") as file:
            return (file.metadata() or {}).get(KEY)
    except (OSError, SafetensorError):
        return None


class SensitivityFile(Data):
    """A recipe's `[compression.sensitivity]`: a safetensors file beside the recipe, and its hash.

    The hash fixes what the recipe makes: a file that was replaced is refused.
    """

    file: str = Field(min_length=1)
    sha256: str = Field(pattern="[0-9a-f]{64}")
    _folder: Path = PrivateAttr(default_factory=Path)

    def __eq__(self, other: object) -> bool:
        """Equal if the hashes are: the recipe in a bundle does not know the folder."""
        return isinstance(other, SensitivityFile) and self.sha256 == other.sha256

    def __hash__(self) -> int:
        return hash(self.sha256)

    def beside(self, recipe: Path) -> None:
        """Look for the file in the folder of this recipe."""
        self._folder = recipe.parent

    def read(self) -> Sensitivities:
        """Read the file. Raises CetaneError if it is missing, has another hash or other content."""
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
            raise CetaneError(f"{path}: not a safetensors file: {error}") from error
        if any(v.dtype != "float32" or v.ndim != 1 for v in inputs.values()):
            raise CetaneError(f"{path}: sensitivities must be vectors of fp32")
        return Sensitivities(inputs)
