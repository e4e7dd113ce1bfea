"""The `.mlpackage` on disk, normalised so that equal programs have equal bytes."""

import json
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cetane.hardware.quiet import import_coremltools

EXPORTER = "co.huggingface.exporters.name"
"""The key of the model's name in a package's metadata. swift-transformers fetches the tokenizer of
this name."""
MANIFEST = Path("Manifest.json")
MODEL = Path("Data/com.apple.CoreML/model.mlmodel")
WEIGHTS = Path("Data/com.apple.CoreML/weights/weight.bin")
NAMESPACE = uuid.uuid5(uuid.NAMESPACE_DNS, "com.apple.CoreML")
"""The namespace of the ids that `normalize` derives from the paths of a package's items."""


def read_spec(package: Path) -> Any:
    """A package's specification. coremltools' own reader writes the package's manifest anew, and a
    user's bundle may be read-only."""
    spec = import_coremltools().proto.Model_pb2.Model()
    spec.ParseFromString((package / MODEL).read_bytes())
    return spec


def normalize(package: Path) -> None:
    """Rewrite a package in place so that equal programs give equal bytes.

    coremltools names the items of a package by random ids, and serialises protobuf maps in any
    order. Both are fixed here, so that hashes can compare two builds.
    """
    spec = read_spec(package)
    (package / MODEL).write_bytes(spec.SerializeToString(deterministic=True))
    manifest = package / MANIFEST
    content = json.loads(manifest.read_bytes())
    renamed = {
        old: str(uuid.uuid5(NAMESPACE, item["path"]))
        for old, item in content["itemInfoEntries"].items()
    }
    entries = {renamed[old]: item for old, item in content["itemInfoEntries"].items()}
    content["itemInfoEntries"] = entries
    content["rootModelIdentifier"] = renamed[content["rootModelIdentifier"]]
    # In coremltools' own format: it rewrites the manifest of every package that it opens.
    manifest.write_text(json.dumps(content, indent=4, sort_keys=True) + "\n")


def annotate(package: Path, metadata: Mapping[str, str]) -> None:
    """Add entries to a package's metadata, in place; they replace entries of the same key."""
    spec = read_spec(package)
    spec.description.metadata.userDefined.update(metadata)
    (package / MODEL).write_bytes(spec.SerializeToString(deterministic=True))


def enumerate_shapes(package: Path) -> None:
    """Allow only two shapes of every flexible input: its default, and its largest.

    Core ML runs an input with a range of sizes on the ANE only at its default shape. It compiles
    enumerated shapes for the ANE.
    """
    spec = read_spec(package)
    for item in spec.description.input:
        array = item.type.multiArrayType
        largest = [size.upperBound for size in array.shapeRange.sizeRanges]
        if not largest:
            continue
        array.ClearField("shapeRange")
        for shape in (array.shape, largest):
            array.enumeratedShapes.shapes.add().shape.extend(shape)
    (package / MODEL).write_bytes(spec.SerializeToString(deterministic=True))


def single_function(package: Path, function: str) -> Any:
    """A coremltools model of one function of a package, as `main`.

    coremltools' optimizers and debuggers only take models without a list of functions. Raises
    ValueError if there is no such function.
    """
    ct, spec = import_coremltools(), read_spec(package)
    described = [f for f in spec.description.functions if f.name == function]
    if not described:
        raise ValueError(f"{package} has no function {function!r}")
    single = ct.proto.Model_pb2.Model(specificationVersion=spec.specificationVersion)
    single.mlProgram.version = spec.mlProgram.version
    single.mlProgram.functions["main"].CopyFrom(spec.mlProgram.functions[function])
    for field in ("input", "output", "state"):
        getattr(single.description, field).extend(getattr(described[0], field))
    return ct.models.MLModel(single, weights_dir=str((package / WEIGHTS).parent))
