"""The `.mlpackage` folder: its specification and its weight files."""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from cetane.errors import CetaneError
from cetane.files import read_bytes
from cetane.mil.program import plain_name
from cetane.mil.proto import model_message
from cetane.validation import parse_json, validated

LARGEST_MANIFEST = 1 << 20
"""Bytes. A manifest lists two items."""
LARGEST_SPECIFICATION = 1 << 29
"""Bytes. Weights have their own files, so the specification of 1,000 ops has half a megabyte."""


class Item(BaseModel):
    """An item of a package, with the keys that Core ML's own reader wants (coremltools 9,
    `libmodelpackage`)."""

    author: str
    description: str
    name: str
    path: str


class PackageManifest(BaseModel):
    """`Manifest.json`. The version is the only one that there is."""

    fileFormatVersion: Literal["1.0.0"]
    itemInfoEntries: dict[str, Item]
    rootModelIdentifier: str


class Package:
    """An `.mlpackage`. `spec` is the Model message parsed from `spec_path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.spec_path = _root_model(path)
        self.spec = _parse(self.spec_path)

    def file(self, name: str) -> Path:
        """The path of the file `name` ("@model_path/weights/weight.bin"), inside the package.

        Raises CetaneError if it is missing, or lies outside the package.
        """
        parts = name.removeprefix("@model_path/").split("/")
        file = self.spec_path.parent
        for part in parts:
            if part != "..":  # `_inside` refuses it in its own words
                plain_name(part, "weight file")
            file /= part
        return _inside(self.path, file, "weight file")


def _root_model(path: Path) -> Path:
    """The specification that the manifest names as the root model."""
    manifest = path / "Manifest.json"
    if not manifest.is_file():
        raise CetaneError(
            f"{path} is not a Core ML package: it has no Manifest.json",
            hint="an .mlpackage is a folder" if path.is_file() else None,
        )
    where = f"{manifest} is not a package manifest"
    content = parse_json(read_bytes(manifest, LARGEST_MANIFEST), f"{where}: it", unique=True)
    listed = validated(PackageManifest, content, where)
    for item in listed.itemInfoEntries.values():
        _inside(path, path / "Data" / item.path, "item", folder=True)
    root = listed.itemInfoEntries.get(listed.rootModelIdentifier)
    if root is None:
        raise CetaneError(f"{where}: it lists no item {listed.rootModelIdentifier!r}, its root")
    return _inside(path, path / "Data" / root.path, "model specification")


def _inside(package: Path, file: Path, what: str, folder: bool = False) -> Path:
    """A file of a package, or a folder where one may stand. CetaneError if it is missing or lies
    outside."""
    try:
        inside = file.resolve().is_relative_to(package.resolve())
        there = file.is_file() or (folder and file.is_dir())
    except (OSError, RuntimeError, ValueError):  # a link to itself, or a name that none can have
        inside = False
    if not inside:
        raise CetaneError(f"{package}: the {what} {file} is outside the package")
    if not there:
        raise CetaneError(f"{package}: the {what} {file.relative_to(package)} is missing")
    return file


def _parse(file: Path) -> Any:
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    spec = model_message()()
    try:
        spec.ParseFromString(read_bytes(file, LARGEST_SPECIFICATION))
    except (DecodeError, RecursionError):
        raise CetaneError(f"{file} is not a Core ML specification: it cannot be parsed") from None
    return spec
