"""Files that a recipe names, each with its hash: so a recipe means the same in every folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from pydantic import Field, PrivateAttr, model_validator

from cetane.errors import CetaneError
from cetane.files import LARGEST_TEXT, disk_errors, read_text, replacing, sha256
from cetane.validation import Data, Sha256


class RecipeFile(Data):
    """A file that a recipe names, and its SHA-256."""

    file: str = Field(min_length=1)
    """Its path, relative to the recipe's folder."""
    sha256: Sha256
    """The hash of its content: another file is refused."""
    _path: Path | None = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def is_table(cls, content: Any) -> Any:
        if isinstance(content, str):
            raise ValueError(f"name a file with its hash: {{file = '{content}', sha256 = '...'}}")
        return content

    def __eq__(self, other: object) -> bool:
        """Equal content, in any folder: a bundle's recipe does not know the folder."""
        return isinstance(other, type(self)) and self.sha256 == other.sha256

    def __hash__(self) -> int:
        return hash(self.sha256)

    def find_beside(self, recipe: Path) -> None:
        """Look for the file in the folder of the recipe at this path."""
        self.find_at(recipe.parent / self.file)

    def find_at(self, path: Path) -> None:
        """Look for the file at a path, whatever its name there."""
        self._path = path

    @property
    def path(self) -> Path:
        return self._path or Path(self.file)

    def verify(self, key: str, hint: str) -> Path:
        """The file's path. Raises CetaneError, which begins with the recipe's `key` and has this
        `hint`, if the file cannot be read or has another hash."""
        try:
            same = sha256(self.path) == self.sha256
        except CetaneError as error:
            raise CetaneError(f"{key}: {error.message}", hint) from error
        if not same:
            raise CetaneError(
                f"{key}: {self.path} is not the file that the recipe was written for: its SHA-256 "
                "differs",
                hint,
            )
        return self.path


class TextFile(RecipeFile):
    """A recipe's `[compression.text]`."""

    @classmethod
    def of(cls, path: Path) -> TextFile:
        """The text file at a path. Raises CetaneError if `read` refuses it. A recipe holds only its
        name: bundles go to others, who need not know a user's folders."""
        made = cls(file=path.name, sha256=sha256(path))
        made.find_beside(path.absolute())
        made.read()  # refuses a bad text before any work
        return made

    def read(self) -> str:
        """The text, UTF-8. CetaneError if it is missing, has another hash or is too large."""
        return read_text(self._whole(), LARGEST_TEXT)

    def copy_to(self, folder: Path) -> TextFile:
        """Copy the file into a folder, named by its hash. Raises CetaneError as `read` does, and if
        the copy cannot be written."""
        name = f"{self.sha256}.txt"
        with disk_errors(folder), replacing(folder / name) as temporary:
            shutil.copyfile(self._whole(), temporary)
        return TextFile(file=name, sha256=self.sha256)

    def _whole(self) -> Path:
        return self.verify("compression.text", "name the text again: cetane port --text FILE")
