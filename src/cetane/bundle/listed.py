"""A folder whose manifest lists all its other files: the base of bundles and draft heads.

The reader trusts nothing. Every file must be inside the folder, listed, and have the size and the
hash in the manifest.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from cetane.errors import CetaneError
from cetane.files import check_files, inside, is_present, read_json, sha256
from cetane.schema.draft_head import DraftHeadManifest
from cetane.schema.manifest import Manifest, check_schema
from cetane.validation import validated

if TYPE_CHECKING:  # a bundle is opened without numpy
    import numpy as np

M = TypeVar("M", Manifest, DraftHeadManifest)


class ListedFolder(Generic[M]):
    """A folder and its manifest. Opening checks the manifest; `verify` checks every file."""

    manifest_name: ClassVar[str]
    schema: ClassVar[int]
    """The version of the manifest that this cetane reads."""
    hint: ClassVar[str]
    """The advice in errors: how to get a whole folder."""

    def __init__(self, path: Path, kind: type[M]) -> None:
        """Raises CetaneError for a damaged or hostile manifest."""
        self.path = path
        self.manifest: M = self._read_manifest(self.file(self.manifest_name), kind)
        for name in self.manifest.files:
            self.file(name)

    def _read_manifest(self, file: Path, kind: type[M]) -> M:
        if not is_present(file):
            raise CetaneError(f"{self.path}: no {file.name}", self.hint)
        content = read_json(file, follow=False, unique=True)  # apps may take the first of two keys
        check_schema(content, self.schema, file, self.hint)
        return validated(kind, content, str(file))

    @cached_property
    def digest(self) -> str:
        """sha256 of the manifest: the identity of the folder, since it lists every file's hash."""
        return sha256(self.path / self.manifest_name)

    def file(self, name: str) -> Path:
        """A path inside the folder. Raises CetaneError for a path outside."""
        return inside(self.path, name)

    def verify(self) -> None:
        """Raise CetaneError if a listed file is missing or changed."""
        check_files(self.path, self.manifest.files, self.hint)

    def array(self, name: str, dtype: str, shape: tuple[int | None, ...]) -> np.ndarray[Any, Any]:
        """A memory-mapped numpy file. None in `shape` stands for any length.

        Raises CetaneError for another dtype or shape.
        """
        import numpy as np

        from cetane.npy import open_array

        # A plain view: numpy's class of mapped arrays takes 4 us more for each part of one.
        return np.asarray(open_array(self.file(name), dtype, shape))
