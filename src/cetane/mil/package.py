"""The `.mlpackage` folder: its specification and its weight files."""

from pathlib import Path
from typing import Any

from cetane.errors import CetaneError
from cetane.files import read_bytes
from cetane.mil.program import plain_name
from cetane.mil.proto import model_message
from cetane.validation import parse_json

LARGEST_MANIFEST = 1 << 20
"""Bytes. A manifest lists two items."""
FORMAT, ITEM_KEYS = "1.0.0", ("author", "description", "name", "path")
"""The only version of package manifests, and what each of their items must have."""
LARGEST_SPECIFICATION = 1 << 29
"""Bytes. Weights have their own files, so the specification of 1,000 ops has half a megabyte."""


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
    try:
        content = parse_json(
            read_bytes(manifest, LARGEST_MANIFEST),
            f"{manifest} is not a package manifest: it",
            unique=True,
        )
        check_items(path, content)
        entry = content["itemInfoEntries"][content["rootModelIdentifier"]]["path"]
        return _inside(path, path / "Data" / entry, "model specification")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CetaneError(f"{manifest} is not a package manifest: {error!r}") from None


def check_items(path: Path, manifest: Any) -> None:
    """Raise CetaneError or ValueError for a manifest that Core ML's own reader refuses
    (coremltools 9, `libmodelpackage`), and for items outside the package."""
    if manifest["fileFormatVersion"] != FORMAT:
        raise ValueError(f"fileFormatVersion = {manifest['fileFormatVersion']!r}, not {FORMAT}")
    for item in manifest["itemInfoEntries"].values():
        for key in ITEM_KEYS:
            if not isinstance(item[key], str):
                raise ValueError(f"an item's {key} = {item[key]!r}, which is no text")
        _inside(path, path / "Data" / item["path"], "item", folder=True)


def _inside(package: Path, file: Path, what: str, folder: bool = False) -> Path:
    """A file of a package, or a folder where one may stand. CetaneError if it is missing or lies
    outside."""
    try:
        inside = file.resolve().is_relative_to(package.resolve())
    except (OSError, RuntimeError):  # a link to itself
        inside = False
    if not inside:
        raise CetaneError(f"{package}: the {what} {file} is outside the package")
    if not (file.is_file() or (folder and file.is_dir())):
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
