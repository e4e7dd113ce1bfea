"""A child's job: one function, loaded, called and planned by Core ML."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from . import Json
from .children import tell
from .compute_plan import plan
from .loading import compile_package, load
from .machine import peak_bytes
from .times import clocked, spread, timed


def measure(job: Json) -> None:
    """Measure one function, and tell every phase as it ends.

    `job` has:

    - `package`, `compiled`, `function`: two paths, and the function's name
    - `several`, `stateful`: whether the package has other functions, and the function has states
    - `inputs`: an .npz of inputs and expected outputs
    - `zeros`, `int8`: shapes of the empty inputs by name, and names of the int8 inputs
    - `units`, `plan`: the compute units, and whether to ask for a compute plan
    """
    compiled = Path(job["compiled"])
    if not compiled.is_dir():
        ms = clocked(lambda: compile_package(Path(job["package"]), compiled))
        tell({"phase": "compile", "ms": ms})
    loads: list[Any] = []
    for _ in range(2):
        ms = clocked(lambda: loads.append(load(job)))
        tell({"phase": "load again" if len(loads) > 1 else "load", "ms": ms})
    tell({"phase": "predict", **predictions(loads[-1], job)})
    if job["plan"]:
        with tempfile.TemporaryDirectory(prefix="plan-") as folder:
            ops = plan(Path(job["package"]), job["function"], Path(folder), job["units"])
        tell({"phase": "plan", "ops": ops})
    tell({"end": True, "peak_bytes": peak_bytes()})


def predictions(model: Any, job: Json) -> Json:
    """The times of predictions on the kit's inputs, and the errors of their outputs."""
    with np.load(job["inputs"], allow_pickle=False) as arrays:
        stored = {name: arrays[name] for name in arrays.files}
    inputs = {name[3:]: value for name, value in stored.items() if name.startswith("in/")}
    for name, shape in job["zeros"].items():  # caches and histories of a new sequence
        inputs[name] = np.zeros(shape, np.int8 if name in job["int8"] else np.float16)
    state = model.make_state() if job["stateful"] else None

    def predict() -> dict[str, Any]:
        made: dict[str, Any] = (
            model.predict(inputs) if state is None else model.predict(inputs, state)
        )
        return made

    first = time.perf_counter()
    outputs = predict()  # before the state has anything
    first_ms = 1e3 * (time.perf_counter() - first)
    expected = {name[4:]: value for name, value in stored.items() if name.startswith("out/")}
    times = timed(predict)
    return {
        "first_ms": round(first_ms, 4),
        **spread(times),
        "finite": all(bool(np.isfinite(v).all()) for v in outputs.values() if v.dtype.kind == "f"),
        "errors": {name: error(outputs[name], want) for name, want in expected.items()},
    }


def error(value: Any, expected: Any) -> float | None:
    """The norm of the difference, divided by that of the expected output. None if a value is not
    finite, or if the sizes differ."""
    value, expected = np.asarray(value, np.float64), np.asarray(expected, np.float64)
    finite = np.isfinite(value).all() and np.isfinite(expected).all()
    if value.size != expected.size or not finite:
        return None
    gap = np.linalg.norm(value.reshape(-1) - expected.reshape(-1))
    return float(gap / max(float(np.linalg.norm(expected)), 1e-30))
