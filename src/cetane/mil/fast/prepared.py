"""Prepared models on disk. To open one reads no package and decodes no weight.

A folder holds one model of a package (`model.onnx`), its weights, which onnxruntime maps into
memory (`weights.bin`), and the feeding of each function (`index.json`).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cetane.errors import CetaneError
from cetane.mil.dtypes import Array
from cetane.mil.fast.arrays import align
from cetane.mil.fast.functions import FastFunction, Feeding, View
from cetane.mil.fast.sessions import open_session
from cetane.mil.program import Signature, SizeRange, TensorType

if TYPE_CHECKING:
    import onnxruntime as ort

    from cetane.mil.fast.program import SharedModel

MODEL, WEIGHTS, INDEX = "model.onnx", "weights.bin", "index.json"


def write(shared: SharedModel, folder: Path) -> None:
    """Write a model into an empty folder. Only one weight is in memory at a time."""
    proto = shared.proto
    with (folder / WEIGHTS).open("wb") as data:
        for initializer in proto.graph.initializer:
            weight = shared.weight(initializer.name)
            if weight is None:
                continue
            array = np.ascontiguousarray(weight)
            align(data)
            place = {"location": WEIGHTS, "offset": data.tell(), "length": array.nbytes}
            del initializer.external_data[:]
            for key, value in place.items():
                initializer.external_data.add(key=key, value=str(value))
            data.write(array.data)
    content = proto.SerializeToString()
    (folder / MODEL).write_bytes(content)
    index = {
        "model": hashlib.sha256(content).hexdigest(),
        "weights": _identity(folder / WEIGHTS),
        "functions": {name: _as_json(feeding) for name, feeding in shared.feedings.items()},
    }
    (folder / INDEX).write_text(json.dumps(index))


@dataclass(frozen=True)
class PreparedModel:
    """A prepared model, opened from its folder."""

    feedings: dict[str, Feeding]
    session: ort.InferenceSession

    @classmethod
    def read(cls, folder: Path) -> PreparedModel:
        """Open a folder. Raises CetaneError if `write` has not finished it, or if it is damaged."""
        try:
            index = json.loads((folder / INDEX).read_text())
            functions = {n: _from_json(n, content) for n, content in index["functions"].items()}
            content = (folder / MODEL).read_bytes()
            if hashlib.sha256(content).hexdigest() != index["model"]:
                raise CetaneError(f"{folder / MODEL} is damaged")
            if _identity(folder / WEIGHTS) != index["weights"]:
                raise CetaneError(f"{folder / WEIGHTS} is damaged")
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise CetaneError(f"{folder} holds no prepared model: {error!r}") from error
        return cls(functions, open_session(str(folder / MODEL)))

    def function(self, name: str) -> FastFunction:
        """The function of this name."""
        return FastFunction(self.feedings[name], self.session)


def _identity(weights: Path) -> list[int]:
    """Size and time of writing. The hash of half a gigabyte takes a third of a second, which every
    start of `cetane run` would pay, and the folder is the user's own."""
    status = weights.stat()
    return [status.st_size, status.st_mtime_ns]


def holds(folder: Path, function: str) -> bool:
    """Whether a folder's index lists this function. Checks no other file."""
    try:
        return function in json.loads((folder / INDEX).read_text())["functions"]
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _as_json(feeding: Feeding) -> dict[str, Any]:
    signature = feeding.signature
    return {
        "inputs": {name: _type_as_json(type_) for name, type_ in signature.inputs.items()},
        "outputs": {name: _type_as_json(type_) for name, type_ in signature.outputs.items()},
        "states": {name: _type_as_json(type_) for name, type_ in signature.states.items()},
        "whole": feeding.whole,
        "views": {n: [v.source, v.begin, v.end] for n, v in feeding.views.items()},
        "constants": {n: [str(a.dtype), a.tolist()] for n, a in feeding.constants.items()},
        "results": feeding.results,
    }


def _from_json(name: str, content: dict[str, Any]) -> Feeding:
    types = (
        {n: _type_from_json(t) for n, t in content[what].items()}
        for what in ("inputs", "outputs", "states")
    )
    constants: dict[str, Array] = {
        n: np.array(values, dtype) for n, (dtype, values) in content["constants"].items()
    }
    views = {n: View(*view) for n, view in content["views"].items()}
    whole, results = tuple(content["whole"]), dict(content["results"])
    return Feeding(Signature(name, *types), whole, views, constants, results)


def _type_as_json(type_: TensorType) -> list[Any]:
    shape = [s if isinstance(s, int) else [s.lower, s.upper] for s in type_.shape]
    return [shape, type_.dtype, type_.default, type_.enumerated, type_.any_shape]


def _type_from_json(content: list[Any]) -> TensorType:
    shape, dtype, default, enumerated, any_shape = content
    return TensorType(
        tuple(s if isinstance(s, int) else SizeRange(*s) for s in shape),
        dtype,
        None if default is None else tuple(default),
        tuple(map(tuple, enumerated)),
        any_shape,
    )
