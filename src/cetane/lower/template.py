"""Templates: finished packages into which the weights of any shard of a structure are stamped.

Conversion takes most of a build, and depends only on the structure of a shard. So each structure is
converted once, with placeholders. Weights then replace the placeholders in the package.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cetane.compress.encoded import Affine, Dense, Encoded
from cetane.errors import CetaneError
from cetane.lower.convert import Constants, Placed, convert_shard
from cetane.lower.package import MANIFEST, MODEL, WEIGHTS
from cetane.lower.placeholders import placeholder
from cetane.lower.tracing import Constant, constants
from cetane.mil.blob import BlobFile
from cetane.mil.package import Package
from cetane.planner import Programs

Bytes = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Slot:
    """The place of a part of a constant: in the weight file at `offset`, or if that is None, in
    the values of the specification."""

    nbytes: int
    offset: int | None
    values: tuple[Any, ...] = ()


def used_by(planner: Programs, shard: str) -> dict[str, Constant]:
    """The weights that a shard uses, by label."""
    graphs = planner.graphs(shard)
    return {item.label: item for graph in graphs for item in constants(planner, shard, graph)}


class Template:
    """The package of a structure, made from one shard, and valid for all shards of the
    structure."""

    def __init__(self, planner: Programs, shard: str, scratch: Path) -> None:
        """Convert the shard to `scratch`, an `.mlpackage` that must not exist. It can be removed
        afterwards."""
        used = used_by(planner, shard)
        made = {
            label: placeholder(number, item.weight.shape, item.format)
            for number, (label, item) in enumerate(used.items())
        }
        placed = convert_shard(planner, shard, made.__getitem__, scratch)
        package = Package(scratch)
        self.spec, self.manifest = package.spec, (scratch / MANIFEST).read_bytes()
        blobs = BlobFile(scratch / WEIGHTS)
        by_label = values_of(self.spec, placed)
        self.slots = {
            label: {part: locate(label, content, by_label[label][part], blobs)
                    for part, content in stored(made[label])}
            for label in used
        }  # fmt: skip
        self.size = blobs.size
        self.rest = [(start, blobs.bytes(start, stop).tobytes()) for start, stop in self._gaps()]

    def stamp(self, constant: Constants, target: Path) -> None:
        """Write a package with the weights that `constant` gives for their labels, one at a time.

        `target` must not exist. The bytes are equal to those of `convert_shard` with these weights.
        """
        for path in (MODEL, WEIGHTS):
            (target / path).parent.mkdir(parents=True, exist_ok=True)
        (target / MANIFEST).write_bytes(self.manifest)
        with (target / WEIGHTS).open("wb") as file:
            file.truncate(self.size)
            for offset, content in self.rest:
                file.seek(offset)
                file.write(content)
            for label, slots in self.slots.items():
                for part, data in stored(constant(label)):
                    slot = slots[part]
                    if data.nbytes != slot.nbytes:
                        raise CetaneError(
                            f"the {part} of {label} has {data.nbytes} bytes, not {slot.nbytes}"
                        )
                    if slot.offset is not None:
                        file.seek(slot.offset)
                        file.write(data.data)
                    for value in slot.values:
                        value.immediateValue.tensor.bytes.values = data.tobytes()
        (target / MODEL).write_bytes(self.spec.SerializeToString(deterministic=True))

    def _gaps(self) -> Iterator[tuple[int, int]]:
        """The ranges of the weight file between the slots."""
        slots = [slot for parts in self.slots.values() for slot in parts.values()]
        taken = sorted((s.offset, s.offset + s.nbytes) for s in slots if s.offset is not None)
        at = 0
        for start, stop in [*taken, (self.size, self.size)]:
            if start < at:
                raise CetaneError("lowering stored two weights in one place")
            if start > at:
                yield at, start
            at = stop


def values_of(spec: Any, placed: Placed) -> dict[str, dict[str, list[Any]]]:
    """The values in a specification that hold weights, by label and part."""
    by_label: dict[str, dict[str, list[Any]]] = {}
    for name, labels in placed.items():
        function = spec.mlProgram.functions[name]
        for op in function.block_specializations[function.opset].operations:
            label = labels.get(op.attributes["name"].immediateValue.tensor.strings.values[0])
            if label is None:
                continue
            parts = by_label.setdefault(label, {})
            if op.type == "const":
                parts.setdefault("weight", []).append(op.attributes["val"])
            for part, argument in op.inputs.items():
                parts.setdefault(part, []).append(argument.arguments[0].value)
    return by_label


def locate(label: str, content: Bytes, values: list[Any], blobs: BlobFile) -> Slot:
    """The slot of a part with this content; each of `values` holds it or points to it.

    Raises CetaneError unless it lies in one place of the weight file, or in the values themselves.
    """
    kinds = {value.WhichOneof("value") for value in values}
    if kinds == {"immediateValue"}:
        if any(value.immediateValue.tensor.bytes.values != content.tobytes() for value in values):
            raise CetaneError(f"lowering changed the weight {label}")
        return Slot(content.nbytes, None, tuple(values))
    offsets = {value.blobFileValue.offset for value in values}
    if kinds != {"blobFileValue"} or len(offsets) != 1:
        raise CetaneError(f"lowering stored the weight {label} more than once")
    start, size = blobs.extent(offsets.pop())
    if not np.array_equal(as_bytes(blobs.bytes(start, start + size)), content):
        raise CetaneError(f"lowering changed the weight {label}")
    return Slot(size, start)


def stored(encoded: Encoded) -> Iterator[tuple[str, Bytes]]:
    """The parts of a constant in the form of the file: flat arrays of bytes."""
    if isinstance(encoded, Dense):
        yield "weight", as_bytes(encoded.weight)
    elif isinstance(encoded, Affine):
        yield "data", encoded.packed()
        yield "scale", as_bytes(encoded.scale)
    else:
        yield "indices", encoded.packed()
        yield "lut", as_bytes(encoded.lut)


def as_bytes(array: Bytes) -> Bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
