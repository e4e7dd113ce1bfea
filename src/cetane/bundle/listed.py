"""A folder whose manifest lists all its other files: what a bundle and its draft heads share.

Reading one trusts nothing: every file is inside the folder, listed, and has the size and the hash
that the manifest says.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from cetane.files import check_files, inside, read_json, sha256
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
    """How to get a folder that is whole."""

    def __init__(self, path: Path, kind: type[M]) -> None:
        """CetaneError for a manifest that is damaged or hostile."""
        self.path = path
        self.manifest: M = self._read_manifest(self.file(self.manifest_name), kind)
        for name in self.manifest.files:
            self.file(name)

    def _read_manifest(self, file: Path, kind: type[M]) -> M:
        content = read_json(file, follow=False)
        check_schema(content, self.schema, file, self.hint)
        return validated(kind, content, str(file))

    @cached_property
    def digest(self) -> str:
        """sha256 of the manifest: the identity of the folder, since it lists every file's hash."""
        return sha256(self.path / self.manifest_name)

    def file(self, name: str) -> Path:
        """A path inside the folder; CetaneError for any that is not."""
        return inside(self.path, name)

    def verify(self) -> None:
        """CetaneError if a listed file is missing or changed."""
        check_files(self.path, self.manifest.files, self.hint)

    def array(self, name: str, dtype: str, shape: tuple[int | None, ...]) -> np.ndarray[Any, Any]:
        """A numpy file, memory-mapped; CetaneError unless it has this dtype and shape, where None
        stands for any length."""
        from cetane.bundle.arrays import open_array

        return open_array(self.file(name), dtype, shape)
