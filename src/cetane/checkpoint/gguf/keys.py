"""Typed access to the metadata of a GGUF file."""

from __future__ import annotations

from typing import Any

import numpy as np

from cetane.checkpoint.gguf.file import GGUFFile
from cetane.errors import CetaneError


class Keys:
    """Typed access to the metadata under the architecture's own prefix."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.architecture = file.metadata.get("general.architecture")

    def get(self, key: str) -> Any:
        """The value of `ARCHITECTURE.KEY`; None if the file has none."""
        return self.file.metadata.get(f"{self.architecture}.{key}")

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number above 0. CetaneError for another value, and without value and default."""
        value = self.get(key)
        value = default if value is None else value
        if type(value) is not int or value <= 0:
            raise self.bad(key, "a positive integer", value)
        return value

    def optional(self, key: str) -> int:
        """A number that a file may leave out, or write as 0; then 0."""
        value = self.get(key)
        if value is None:
            return 0
        if type(value) is not int or not 0 <= value < 1 << 31:
            raise self.bad(key, "a whole number from 0 to 2**31 - 1", value)
        return value

    def integers(self, key: str, count: int, default: int | None = None) -> list[int]:
        """A number for each of `count` layers, which a file may write as one for all."""
        value = self.get(key)
        if isinstance(value, np.ndarray) and len(value) >= count and value.dtype.kind in "iu":
            numbers = [int(number) for number in value[:count]]
            if all(0 <= number < 1 << 31 for number in numbers):
                return numbers
        if isinstance(value, np.ndarray):
            raise self.bad(key, f"{count} integers", value)
        return [self.integer(key, default)] * count

    def sliding_layers(self, count: int, period: int | None = None) -> list[bool]:
        """Whether each of `count` layers slides. A file may tell of more: of layers that draft.

        `period`: in files that name none or a number, one layer of so many does not slide.
        """
        key = "attention.sliding_window_pattern"
        if period and not isinstance(self.get(key), np.ndarray):
            period = self.integer(key, period)
            return [(index + 1) % period != 0 for index in range(count)]
        return self.booleans(key, count)

    def booleans(self, key: str, count: int) -> list[bool]:
        """One for each of `count` layers, of a list that may be longer."""
        value = self.get(key)
        if not isinstance(value, np.ndarray) or value.dtype != bool or len(value) < count:
            raise self.bad(key, f"{count} booleans", value)
        return [bool(one) for one in value[:count]]

    def numbers(self, key: str, count: int) -> list[float]:
        """A number for each of `count` layers, under a whole key or the architecture's, which a
        file may write as one for all."""
        value = self.file.metadata.get(key)
        if isinstance(value, float):
            value = np.full(count, value)
        if not isinstance(value, np.ndarray) or value.dtype.kind != "f" or len(value) < count:
            raise CetaneError(f"{self.file.path}: metadata {key} is not {count} numbers")
        if np.isnan(value[:count]).any():
            raise CetaneError(f"{self.file.path}: metadata {key} has NaN")
        return [float(number) for number in value[:count]]

    def number(self, key: str, default: float | None = None) -> float:
        """A finite float above 0. CetaneError for another value, and without value and default."""
        value = self.get(key)
        value = default if value is None else value
        if type(value) is not float or not 0 < value < float("inf"):
            raise self.bad(key, "a positive number", value)
        return value

    def text(self, key: str, default: str) -> str:
        value = self.get(key)
        value = default if value is None else value
        if type(value) is not str:
            raise self.bad(key, "a string", value)
        return value

    def bad(self, key: str, expected: str, value: Any) -> CetaneError:
        state = "is missing" if value is None else f"is {value!r}, not {expected}"
        return CetaneError(f"{self.file.path}: metadata {self.architecture}.{key} {state}")
