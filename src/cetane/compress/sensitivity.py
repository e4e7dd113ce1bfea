"""Sensitivities: how much an error in each column of a weight disturbs the layer's output.

The sensitivity of a column is the mean square of the input that it multiplies, measured over a
text. The output's error is Σ (error of a weight · its input). If these errors are independent, its
mean square is Σ error² · mean(input²). These means are the diagonal of the Hessian that GPTQ and
Optimal Brain Surgeon use; here they weight k-means. There is one number for each input channel. No
backward pass is needed, and the file has some hundred kilobytes.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from cetane.compress.recipe_file import RecipeFile
from cetane.errors import CetaneError
from cetane.files import read_bytes

if TYPE_CHECKING:  # a recipe is read without numpy
    import numpy as np
    import numpy.typing as npt

    Vector = npt.NDArray[np.float32]

SENSITIVITY = "sensitivity.safetensors"
"""The file of sensitivities beside a recipe that cetane writes."""
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


class SensitivityFile(RecipeFile):
    """A recipe's `[compression.sensitivity]`."""

    def read(self) -> Sensitivities:
        """Read the file. Raises CetaneError if it is missing, has another hash or other content."""
        from safetensors import SafetensorError
        from safetensors.numpy import load

        path = self._whole()
        try:
            inputs = load(read_bytes(path, LARGEST))
        except (SafetensorError, ValueError, KeyError) as error:
            raise CetaneError(f"{path}: not a safetensors file: {error}") from error
        if any(v.dtype != "float32" or v.ndim != 1 for v in inputs.values()):
            raise CetaneError(f"{path}: sensitivities must be vectors of fp32")
        return Sensitivities(inputs)

    def copy_to(self, path: Path) -> None:
        """Copy the file. Raises CetaneError if it is missing or has another hash."""
        shutil.copyfile(self._whole(), path)

    def _whole(self) -> Path:
        return self.verify("compression.sensitivity", "cetane sweep MODEL writes it")
