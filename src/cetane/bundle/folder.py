"""The bundle's folder: manifest, shards, embedding, rotary tables, tokenizer, gate results.

A bundle is written under `NAME.partial`, and renamed when its manifest is complete.

Draft heads (`draft_heads.py`) come and go later. Each is a folder with a manifest of its own, bound
to the digest of the bundle's manifest, which does not name them.
"""

import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from cetane.bundle.draft_heads import DraftHead, listed_files, open_draft_heads
from cetane.bundle.listed import ListedFolder
from cetane.bundle.no_bundle import refuse_no_bundle
from cetane.bundle.tables import Tables, TokenRows
from cetane.compress.sensitivity import SENSITIVITY
from cetane.errors import CetaneError
from cetane.files import (
    LARGEST,
    READ_ONLY,
    disk_errors,
    read_json,
    regular_files,
    write_json,
)
from cetane.schema.draft_head import DraftHeadKind
from cetane.schema.function import Function, TablePlan
from cetane.schema.manifest import (
    GATES,
    MANIFEST,
    SCHEMA,
    TOKENIZER,
    Manifest,
    rotary_path,
    shard_path,
    table_path,
)
from cetane.schema.plan import Plan
from cetane.validation import PLAIN_NAME

if TYPE_CHECKING:
    from cetane.checkpoint import Tokenizer

MOST_GATES = 128
"""The most results of gates. A bundle with two draft heads and 32 adapters has some 50."""
HUB_FILES = ("README.md", ".gitattributes")
"""Files of a repository on the hub. Nothing here reads them."""
HUB_CACHE = ".cache/huggingface/"
"""The folder in which the hub's client notes its downloads."""


class Bundle(ListedFolder[Manifest]):
    """A bundle on disk. Opening checks its manifest; `verify` checks every file."""

    manifest_name, schema = MANIFEST, SCHEMA
    hint = "port the model again, or get the bundle again"

    def __init__(self, path: str | Path) -> None:
        """Raises CetaneError for an incomplete bundle, a link, and a damaged or hostile
        manifest."""
        path = Path(path)
        refuse_no_bundle(path)
        regular_files(path)
        super().__init__(path, Manifest)
        counted = self.plan.recipe.compression.sensitivity
        if counted is not None and SENSITIVITY in self.manifest.files:
            counted.find_at(self.file(SENSITIVITY))

    @property
    def plan(self) -> Plan:
        return self.manifest.plan

    def verify(self) -> None:
        """Raise CetaneError if a file is missing, changed, or present but not listed."""
        super().verify()
        draft_heads = list(self.draft_heads().values())
        for draft_head in draft_heads:
            draft_head.verify()
        listed = set(self.manifest.files) | listed_files(draft_heads)
        unknown = set(relative_files(self.path)) - listed
        if unknown:
            stranger = min(unknown)
            raise CetaneError(
                f"{self.path}: {stranger} is not in the manifest",
                f"move it away, then: cetane audit {quote(str(self.path))} --measured FILE"
                if stranger.endswith(".measured.json")
                else "move it away: a bundle holds only its own files",
            )

    def shard(self, name: str) -> Path:
        """The package of a shard."""
        return self.file(shard_path(name))

    def functions(self, name: str) -> tuple[Function, ...]:
        """The functions of a shard."""
        return self.plan.by_name[name].functions

    @property
    def int8_activations(self) -> bool:
        """Whether its programs round activations to 8 bits. Reads the packages' specifications."""
        from cetane.mil import load  # here: a manifest is read without it

        return any(load(self.shard(name)).int8_activations for name in self.plan.by_name)

    def draft_heads(self) -> dict[DraftHeadKind, DraftHead]:
        """Its draft heads, by kind. Raises CetaneError for a draft head of another bundle."""
        return open_draft_heads(self.path, self.digest, self.plan)

    def tables(self) -> Tables:
        """The host's tables, memory-mapped. Raises CetaneError for another shape than the
        plan's."""
        plan = self.plan
        rows = {name: self._rows(name, table) for name, table in plan.tables.items()}
        shape = (2, plan.recipe.cache.context, None)
        rotary = {name: self.array(rotary_path(name), "<f4", shape) for name in plan.rotary}
        return Tables(rows.pop("tokens", None), rotary, rows)

    def _rows(self, name: str, table: TablePlan) -> TokenRows:
        from cetane.bundle.rows import ROW_FORMATS, EncodedRows  # here: it needs numpy

        row_format = ROW_FORMATS[self.plan.recipe.embedding.rows]
        parts = {
            part: self.array(table_path(name, part), dtype, shape)
            for part, (dtype, shape) in row_format.stored(table).items()
        }
        return EncodedRows(row_format, parts, (table.rows, table.channels))

    @cached_property
    def tokenizer(self) -> "Tokenizer":
        from cetane.checkpoint import Tokenizer  # here: a manifest is read without it

        return Tokenizer.load(self.file(TOKENIZER))

    def write_gate(self, name: str, result: dict[str, Any]) -> bool:
        """Store a gate's result, with the bundle's digest.

        Returns False if the bundle is read-only: a gate needs no stored result.
        """
        folder = self.file(GATES)
        try:
            with disk_errors(folder):
                folder.mkdir(exist_ok=True)
                write_json(folder / f"{name}.json", {"bundle": self.digest} | result)
        except CetaneError as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno in READ_ONLY:
                return False
            raise
        return True

    def gates(self) -> dict[str, dict[str, Any]]:
        """Stored gate results as `write_gate` got them, by gate name.

        Results of another build are left out, and so are results of a draft head that was trained
        again. A result names its draft heads in `heads`: digests by kind. CetaneError for more
        results than a bundle can have, or than fit into memory: no manifest lists them.
        """
        results = {}
        digests = {kind: draft.digest for kind, draft in self.draft_heads().items()}
        paths = [
            path
            for path in sorted(self.file(GATES).glob("*.json"))
            if re.fullmatch(PLAIN_NAME, path.stem)  # no gate wrote others; cards print the name
        ]
        size = sum(path.lstat().st_size for path in paths)
        if len(paths) > MOST_GATES or size > LARGEST:
            raise CetaneError(
                f"{self.file(GATES)} holds {len(paths)} results of {size:,} bytes together: more "
                f"than {MOST_GATES}, or than {LARGEST:,} bytes",
                "move the folder away: a bundle runs without it, and its gates can run again",
            )
        for path in paths:
            result = read_json(path, follow=False)
            if result.pop("bundle", None) != self.digest:
                continue
            judged = result.get("heads", {})
            if isinstance(judged, dict) and judged.items() <= digests.items():
                results[path.stem] = result
        return results


def relative_files(root: Path) -> Iterator[str]:
    """The files that a bundle's manifest lists: all but the manifest, the gates' results, and what
    a download from the Hugging Face hub has beside them."""
    for name in regular_files(root):
        if not name.startswith((f"{GATES}/", HUB_CACHE)) and name not in (MANIFEST, *HUB_FILES):
            yield name
