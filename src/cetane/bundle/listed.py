"""A folder whose manifest lists all its other files: what a bundle and its draft heads share.

Reading one trusts nothing: every file is inside the folder, listed, and has the size and the hash
that the manifest says.
"""

import json
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from pydantic import ValidationError

from cetane.errors import CetaneError
from cetane.files import check_files, inside, sha256
from cetane.schema.draft_head import DraftHeadManifest
from cetane.schema.manifest import Manifest

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
        try:
            content = json.loads(file.read_bytes())
            if content["schema_version"] != self.schema:
                raise CetaneError(
                    f"{file}: schema {content['schema_version']}, this cetane reads {self.schema}",
                    self.hint,
                )
            return kind.model_validate(content)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise CetaneError(f"{file}: {where}: {first['msg']}") from error
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise CetaneError(f"{file}: not a manifest: {error!r}") from error

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

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """A numpy file, memory-mapped; CetaneError if it is none."""
        try:
            return np.lib.format.open_memmap(self.file(name), mode="r")
        except (OSError, ValueError) as error:
            raise CetaneError(f"{self.path}: {name}: {error}") from error
