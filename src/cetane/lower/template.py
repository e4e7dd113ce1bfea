"""Templates: finished packages into which the weights of any shard of a structure are stamped.

Conversion takes most of a build, and depends only on the structure of a shard. So each structure is
converted once, with placeholders. Weights then replace the placeholders in the package.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from cetane.compress.encoded import Affine, Dense, Encoded
from cetane.errors import CetaneError
from cetane.lower.convert import Conversions, Placed, convert_shard
from cetane.lower.converted import ConstantOf
from cetane.lower.package import MANIFEST, MODEL, WEIGHTS
from cetane.lower.placeholders import placeholder
from cetane.lower.tracing import LabelledWeight, labelled_weights
from cetane.mil.blob import BlobFile
from cetane.mil.package import Package
from cetane.planner import Programs

Bytes = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Slot:
    """The place of a part of a constant, of `nbytes`: at `offset` of the weight file, or in the
    values of the specification if `offset` is None."""

    nbytes: int
    offset: int | None


def shard_weights(planner: Programs, shard: str) -> dict[str, LabelledWeight]:
    """The weights that a shard uses, by label."""
    graphs = planner.graphs(shard)
    return {
        item.label: item for graph in graphs for item in labelled_weights(planner, shard, graph)
    }


@dataclass(frozen=True)
class Template:
    """The package of a structure, made from one shard, and valid for all shards of the
    structure."""

    spec: Any
    """The specification, a protobuf message. `stamp` writes small weights into it."""
    manifest: bytes
    placed: Placed
    slots: dict[str, dict[str, Slot]]
    """The place of each part of each weight, by label and part."""
    size: int
    """Bytes of the weight file."""
    rest: list[tuple[int, bytes]]
    """The content of the weight file outside the slots, by offset."""

    @classmethod
    def converted(
        cls,
        planner: Programs,
        shard: str,
        scratch: Path,
        conversions: Conversions | None = None,
    ) -> Self:
        """The template of a shard's structure, with placeholders in place of weights.

        `scratch` is the path of a new `.mlpackage`, which the caller can remove afterwards. Raises
        CetaneError if lowering changes a weight, loses it or stores it twice.
        """
        used = shard_weights(planner, shard)
        made = {
            label: placeholder(number, item.weight.shape, item.format)
            for number, (label, item) in enumerate(used.items())
        }
        placed = convert_shard(planner, shard, made.__getitem__, scratch, conversions)
        spec, manifest = Package(scratch).spec, (scratch / MANIFEST).read_bytes()
        blobs = BlobFile(scratch / WEIGHTS)
        by_label = values_of(spec, placed)
        slots = {
            label: {part: locate(label, content, by_label[label][part], blobs)
                    for part, content in stored(made[label])}
            for label in used
        }  # fmt: skip
        rest = [(a, blobs.bytes(a, b).tobytes()) for a, b in gaps(slots, blobs.size)]
        return cls(spec, manifest, placed, slots, blobs.size, rest)

    def stamp(
        self, constant: ConstantOf, target: Path, metadata: Mapping[str, str] | None = None
    ) -> None:
        """Write a package with the weights that `constant` gives for their labels, one at a time,
        and with this metadata.

        `target` must not exist. The bytes are equal to those of `convert_shard` with these weights.
        Raises CetaneError for a weight with another number of bytes than its slot.
        """
        by_label = values_of(self.spec, self.placed)
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
                        continue
                    for value in by_label[label][part]:
                        value.immediateValue.tensor.bytes.values = data.tobytes()
        description = type(self.spec.description)()
        description.CopyFrom(self.spec.description)  # the next package of the structure has its own
        if metadata:
            self.spec.description.metadata.userDefined.update(metadata)
        (target / MODEL).write_bytes(self.spec.SerializeToString(deterministic=True))
        self.spec.description.CopyFrom(description)


def gaps(slots: Mapping[str, Mapping[str, Slot]], size: int) -> Iterator[tuple[int, int]]:
    """First byte and end of every range outside the slots, in a weight file of `size` bytes.

    Raises CetaneError if two slots overlap.
    """
    every = [slot for parts in slots.values() for slot in parts.values()]
    taken = sorted((s.offset, s.offset + s.nbytes) for s in every if s.offset is not None)
    at = 0
    for start, stop in [*taken, (size, size)]:
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
        return Slot(content.nbytes, None)
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
