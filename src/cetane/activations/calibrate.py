"""The calibration: the range of every tensor of a program over samples, by coremltools itself.

It runs through the bridge, so it needs no Mac. Two faults of coremltools 9 are mended meanwhile.
There, the range of a sample replaces that of the samples before it. And each sample writes and
loads a package, which stays until Python ends.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from cetane import bridge
from cetane.activations.temporary import temporary_folder
from cetane.engine.backend import Array, Arrays
from cetane.errors import CetaneError
from cetane.hardware.quiet import import_coremltools
from cetane.lower.package import single_function
from cetane.lower.patches import Patches, patched

Ranges = dict[str, dict[str, float]]
"""`rmin` and `rmax` of each tensor, by its name in the program."""


def calibrate(package: Path, samples: Mapping[str, Sequence[Arrays]]) -> Ranges:
    """Ranges of the tensors of a package's functions, each over the inputs of its own calls.

    Functions of one shard use the same names for their tensors, so the ranges of one hold for all.
    Raises CetaneError if there are no samples, or if one makes a value that is not finite.
    """
    ranges: Ranges = {}
    for function, calls in samples.items():
        if calls:
            with temporary_folder(), bridged(), repaired():
                own = measured_ranges(single_function(package, function), calls)
            for name, new in own.items():
                ranges[name] = hull(ranges.get(name, new), new)
    if not ranges:
        raise CetaneError(f"{package.name}: none of its calls was recorded, so it has no ranges")
    for name, bounds in ranges.items():
        if not np.isfinite([bounds["rmin"], bounds["rmax"]]).all():
            raise CetaneError(f"{package.name}: {name} overflows during calibration")
    return ranges


def measured_ranges(model: Any, samples: Sequence[Arrays]) -> Ranges:
    """The ranges that coremltools measures for a model of one function."""
    from coremltools.optimize.coreml.experimental import _post_training_quantization as calibration

    measured = calibration._get_activation_calibration_stats(model, list(samples))
    return {
        name: {"rmin": float(one["rmin"]), "rmax": float(one["rmax"])}
        for name, one in measured.items()
    }


def hull(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    """The smallest range that holds both."""
    return {
        "rmin": min(one["rmin"], other["rmin"]),
        "rmax": max(one["rmax"], other["rmax"]),
    }


@contextmanager
def bridged() -> Iterator[None]:
    """A context in which coremltools predicts: itself on a Mac, through the bridge elsewhere."""
    import_coremltools()  # first and quietly: the bridge lets later warnings through
    mine = not bridge.installed() and bridge.install()
    try:
        yield
    finally:
        if mine:
            bridge.uninstall()


@contextmanager
def repaired() -> Iterator[None]:
    """A context with a mended calibration: one loaded model for all samples, ranges that grow, and
    no progress bars."""
    from coremltools.optimize.coreml.experimental import _model_debugger as debugger
    from coremltools.optimize.coreml.experimental import _post_training_quantization as calibration

    opened: dict[tuple[str, ...], Any] = {}
    models = debugger.ct.models

    def once(spec: Any, **options: Any) -> Any:
        outputs = tuple(output.name for output in spec.description.output)
        if outputs not in opened:
            opened[outputs] = models.MLModel(spec, **options)
        return opened[outputs]

    def grow(value: Array, name: str, ranges: Any) -> None:
        new = {"rmin": np.min(value), "rmax": np.max(value)}
        ranges[name] = hull(ranges[name] or new, new)

    def silent(iterable: Any, **_: Any) -> Any:
        return iterable

    coremltools = SimpleNamespace(
        proto=debugger.ct.proto, models=SimpleNamespace(MLModel=once), ComputeUnit=None
    )
    patches: Patches = [
        (debugger, "ct", coremltools), (debugger, "tqdm", silent), (calibration, "tqdm", silent),
        (debugger.ModelDebugger, "record_intermediate_output", staticmethod(grow)),
        (calibration, "_update_tensor_range", lambda n, v, ranges: grow(v, n, ranges)),
    ]  # fmt: skip
    with patched(patches):
        yield
