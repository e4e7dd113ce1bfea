"""Prepared models on disk. Opening one reads no package and decodes no weight.

A folder holds functions that share weights, which are mapped into memory (`weights.bin`). The
functions are tapes (`tapes.bin`), or stages: graphs of onnxruntime (`0.onnx`, ...) and attentions.
`index.json` lists them, with its hash beside it: a wrong size in it could end the process.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from cetane.errors import CetaneError
from cetane.files import is_kept, keeping, read_json, sha256
from cetane.mil.fast.arrays import align
from cetane.mil.fast.attention_stage import AttentionStage
from cetane.mil.fast.functions import FastFunction, GraphStage, Stage
from cetane.mil.fast.json_forms import (
    attention_as_json,
    attention_from_json,
    feeding_as_json,
    feeding_from_json,
    signature_as_json,
    signature_from_json,
)
from cetane.mil.fast.sessions import open_session
from cetane.mil.fast.tape.code import NUMBERS, WIDTH, Tape
from cetane.mil.fast.tape.function import function_of, mapped
from cetane.mil.program import Signature, plain_name

if TYPE_CHECKING:
    from cetane.mil.fast.program import SharedModel, SharedStage
    from cetane.mil.fast.tape.model import TapeModel

WEIGHTS, INDEX, TAPES = "weights.bin", "index.json", "tapes.bin"


def write(model: SharedModel | TapeModel, folder: Path) -> None:
    """Write a model into an empty folder. Only one weight is in memory at a time."""
    from cetane.mil.fast.tape.model import TapeModel  # a reader needs neither numba nor onnx

    if isinstance(model, TapeModel):
        _write_tapes(model, folder)
    else:
        _write_graphs(model, folder)


def _write_tapes(model: TapeModel, folder: Path) -> None:
    with (folder / WEIGHTS).open("wb") as target:
        model.weights.seek(0)
        shutil.copyfileobj(model.weights, target, 1 << 20)
    tapes = {}
    with (folder / TAPES).open("wb") as file:
        for name, tape in model.tapes.items():
            tapes[name] = [len(tape.code), tape.arena, tape.runs, tape.work, tape.transposed]
            file.write(tape.code.tobytes() + tape.numbers.tobytes())
    index = {
        "weights": _identity(folder / WEIGHTS),
        "functions": {n: signature_as_json(s) for n, s in model.signatures.items()},
        "tapes": tapes,
        "sha256": sha256(folder / TAPES),
    }
    _keep_index(index, folder)


def _read_tapes(
    folder: Path, index: dict[str, Any], signatures: dict[str, Signature]
) -> dict[str, FastFunction]:
    if sha256(folder / TAPES) != index["sha256"]:
        raise CetaneError(f"{folder / TAPES} is damaged")
    tapes, content, start = {}, (folder / TAPES).read_bytes(), 0
    for name, (count, arena, runs, work, transposed) in index["tapes"].items():
        code = np.frombuffer(content, np.int64, count * WIDTH, start).reshape(count, WIDTH)
        start += code.nbytes
        numbers = np.frombuffer(content, np.float32, count * NUMBERS, start)
        start += numbers.nbytes
        numbers = numbers.reshape(count, NUMBERS)
        tapes[name] = Tape(code, numbers, arena, runs, work, tuple(transposed))
    with (folder / WEIGHTS).open("rb") as file:
        weights = mapped(file)
    return {name: function_of(s, tapes[name], weights, tapes) for name, s in signatures.items()}


def _write_graphs(shared: SharedModel, folder: Path) -> None:
    stages: list[dict[str, Any]] = []
    with (folder / WEIGHTS).open("wb") as data:
        for number, stage in enumerate(shared.stages):
            if isinstance(stage, dict):
                attentions = {n: attention_as_json(own) for n, own in stage.items()}
                stages.append({"attentions": attentions})
                continue
            content = _with_weights(stage, data)
            name = f"{number}.onnx"
            (folder / name).write_bytes(content)
            feedings = {n: feeding_as_json(own) for n, own in stage.feedings.items()}
            digest = hashlib.sha256(content).hexdigest()
            stages.append({"model": name, "sha256": digest, "feedings": feedings})
    index = {
        "weights": _identity(folder / WEIGHTS),
        "functions": {n: signature_as_json(s) for n, s in shared.signatures.items()},
        "stages": stages,
    }
    _keep_index(index, folder)


def _read_graphs(
    folder: Path, index: dict[str, Any], signatures: dict[str, Signature]
) -> dict[str, FastFunction]:
    stages: dict[str, list[Stage | AttentionStage]] = {name: [] for name in signatures}
    for stage in index["stages"]:
        if "attentions" in stage:
            for name, own in stages.items():
                own.append(attention_from_json(stage["attentions"][name]))
            continue
        path = folder / plain_name(stage["model"], "model")
        if sha256(path) != stage["sha256"]:
            raise CetaneError(f"{path} is damaged")
        session = open_session(str(path))
        for name, own in stages.items():
            own.append(GraphStage(feeding_from_json(stage["feedings"][name]), session))
    return {name: FastFunction(s, stages[name]) for name, s in signatures.items()}


def _with_weights(stage: SharedStage, data: BinaryIO) -> bytes:
    """A stage's model, whose weights are appended to a file."""
    proto = stage.proto
    for initializer in proto.graph.initializer:
        weight = stage.weight(initializer.name)
        if weight is None:
            continue
        array = np.ascontiguousarray(weight)
        align(data)
        place = {"location": WEIGHTS, "offset": data.tell(), "length": array.nbytes}
        del initializer.external_data[:]
        for key, value in place.items():
            initializer.external_data.add(key=key, value=str(value))
        data.write(array.data)
    return proto.SerializeToString()


@dataclass(frozen=True)
class PreparedModel:
    """A prepared model, opened from its folder."""

    functions: dict[str, FastFunction]

    @classmethod
    def read(cls, folder: Path) -> PreparedModel:
        """Open a folder. Raises CetaneError if `write` has not finished it, or if it is damaged."""
        try:
            index = _read_index(folder)
            signatures = {n: signature_from_json(n, c) for n, c in index["functions"].items()}
            if _identity(folder / WEIGHTS) != index["weights"]:
                raise CetaneError(f"{folder / WEIGHTS} is damaged")
            read = _read_tapes if "tapes" in index else _read_graphs
            return cls(read(folder, index, signatures))
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise CetaneError(f"{folder} holds no prepared model: {error!r}") from error


def _identity(weights: Path) -> list[int]:
    """Size in bytes and time of writing in nanoseconds, in place of a hash. To hash half a gigabyte
    would delay every start of `cetane run` by a third of a second, and the folder is the user's
    own."""
    status = weights.stat()
    return [status.st_size, status.st_mtime_ns]


def holds(folder: Path, function: str) -> bool:
    """Whether a folder's index is whole and lists this function. Checks no other file."""
    with suppress(CetaneError):
        return function in _read_index(folder)["functions"]
    return False


def _keep_index(index: dict[str, Any], folder: Path) -> None:
    with keeping(folder / INDEX) as temporary:
        temporary.write_text(json.dumps(index))


def _read_index(folder: Path) -> dict[str, Any]:
    """A folder's index. Raises CetaneError unless it is as `write` wrote it."""
    if not is_kept(folder / INDEX):
        raise CetaneError(f"{folder / INDEX} is missing or damaged")
    return read_json(folder / INDEX)
