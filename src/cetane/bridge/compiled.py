"""Compiled models: only Core ML can make and read a real `.mlmodelc`. Here it is a folder of that
name with a copy of the package, which cetane opens as any package."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

from cetane.errors import CetaneError
from cetane.mil.package import Package
from cetane.mil.program import plain_name
from cetane.mil.reader import load_pipeline


def compiled_copy(path: Path) -> Path:
    """A copy of a package in a new temporary folder, which the caller removes.

    Raises CetaneError if `path` holds no ML programs."""
    if path.is_file():
        raise CetaneError(f"{path} is not a package: only ML programs run here")
    load_pipeline(path)  # raises if it is not an ML program
    folder = Path(tempfile.mkdtemp(prefix=f"cetane-{path.stem}-", suffix=".mlmodelc"))
    shutil.copytree(path, folder, dirs_exist_ok=True)
    return folder


def package_in_memory(spec_data: bytes, blobs: dict[str, bytes]) -> Path:
    """A package in a new temporary folder, which the caller removes, from a serialized
    specification and weight files by path, as in "weights/weight.bin".

    Raises CetaneError if the specification cannot be parsed, or for a path out of the package.
    """
    from coremltools.models.utils import _create_mlpackage
    from coremltools.proto import Model_pb2
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    spec: Any = Model_pb2.Model()
    try:
        spec.ParseFromString(spec_data)
    except DecodeError:
        raise CetaneError("this is not a Core ML specification: it cannot be parsed") from None
    files = {}
    for name, data in blobs.items():
        parts = name.removeprefix("@model_path/").split("/")
        files[Path(*(plain_name(part, "weight file") for part in parts))] = data
    package = Path(_create_mlpackage(spec))
    folder = Package(package).spec_path.parent
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return package
