"""The folder that ships: manifest, shards, embedding, rotary tables, tokenizer, gate results.

A bundle is written under `NAME.partial` and renamed when its manifest is complete. Reading one
trusts nothing: every file is inside the folder, listed, and has the size and hash it should.

Draft heads (`draft_heads.py`) come and go after that: each is a folder with a manifest of its own,
bound to the digest of the manifest here, which does not name them.
"""

import errno
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cetane.bundle.arrays import open_array
from cetane.bundle.draft_heads import HeadShard, listed_files, open_heads
from cetane.bundle.tables import QuantizedRows, Rows, Tables
from cetane.errors import CetaneError
from cetane.files import (
    check_files,
    disk_errors,
    inside,
    read_json,
    sha256,
    write_json,
)
from cetane.schema.draft_head import HeadKind
from cetane.schema.function import Function, TablePlan
from cetane.schema.manifest import (
    GATES,
    MANIFEST,
    SCHEMA,
    TOKENIZER,
    Manifest,
    check_schema,
    rotary_path,
    scales_path,
    shard_path,
    table_path,
)
from cetane.schema.plan import Plan
from cetane.validation import validated

if TYPE_CHECKING:
    from cetane.checkpoint import Tokenizer

READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


class Bundle:
    """A bundle on disk. Opening checks the manifest; `verify` checks every file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_dir():
            raise CetaneError(f"{path}: no such bundle", "cetane port MODEL makes one")
        file = path / MANIFEST
        if not file.is_file():
            hint = "run the same cetane port again, it goes on where it stopped"
            raise CetaneError(f"{path}: no {MANIFEST}, not a complete bundle", hint)
        regular_files(path)
        self.manifest = self._read_manifest(file)

    def _read_manifest(self, file: Path) -> Manifest:
        content = read_json(file, follow=False)
        check_schema(content, SCHEMA, file, "port the model again")
        manifest = validated(Manifest, content, str(file))
        for name in manifest.files:
            self.file(name)
        return manifest

    @property
    def plan(self) -> Plan:
        return self.manifest.plan

    @cached_property
    def digest(self) -> str:
        """sha256 of the manifest: the identity of the bundle, since it lists every file's hash."""
        return sha256(self.path / MANIFEST)

    def file(self, name: str) -> Path:
        """A path inside the bundle; CetaneError for any that is not."""
        return inside(self.path, name)

    def verify(self) -> None:
        """CetaneError if a file is missing, changed, or present but not listed."""
        hint = "port the model again, or get the bundle again"
        check_files(self.path, self.manifest.files, hint)
        heads = list(self.heads().values())
        for head in heads:
            head.verify()
        unknown = set(relative_files(self.path)) - set(self.manifest.files) - listed_files(heads)
        if unknown:
            raise CetaneError(f"{self.path}: {min(unknown)} is not in the manifest")

    def shard(self, name: str) -> Path:
        """The package of a shard."""
        return self.file(shard_path(name))

    def functions(self, name: str) -> tuple[Function, ...]:
        """The functions of a shard."""
        return self.plan.by_name[name].functions

    def heads(self) -> dict[HeadKind, HeadShard]:
        """Draft heads, as they are now; CetaneError for one that was trained for another bundle."""
        return open_heads(self.path, self.digest, self.plan)

    def tables(self) -> Tables:
        """The host's tables, memory-mapped; CetaneError if one has not the shape of the plan."""
        plan = self.plan
        rows = {name: self._rows(name, table) for name, table in plan.tables.items()}
        shape = (2, plan.recipe.cache.context, None)
        rotary = {n: open_array(self.file(rotary_path(n)), "<f4", shape) for n in plan.rotary}
        return Tables(rows.pop("tokens", None), dict(rotary), rows)

    def _rows(self, name: str, table: TablePlan) -> Rows:
        path, shape = self.file(table_path(name)), (table.rows, table.channels)
        if self.plan.recipe.embedding.format == "fp16":
            return open_array(path, "<f2", shape)
        scales = open_array(self.file(scales_path(name)), "<f2", (table.rows,))
        return QuantizedRows(open_array(path, "|i1", shape), scales)

    @cached_property
    def tokenizer(self) -> "Tokenizer":
        from cetane.checkpoint import Tokenizer  # here: a manifest is read without it

        return Tokenizer.load(self.file(TOKENIZER))

    def write_gate(self, name: str, result: dict[str, Any]) -> bool:
        """Store a gate's result, tied to this bundle by its digest; False where the bundle may not
        be written, which hinders no gate."""
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
        """Stored gate results by gate name; those of another build are left out, and so are those
        that judged `heads` (digests by kind) which have been trained again."""
        results = {}
        heads = {kind: head.digest for kind, head in self.heads().items()}
        for path in sorted(self.file(GATES).glob("*.json")):
            result = read_json(path, follow=False)
            if result.get("bundle") != self.digest:
                continue
            judged = result.get("heads", {})
            if isinstance(judged, dict) and judged.items() <= heads.items():
                results[path.stem] = result
        return results


def relative_files(root: Path) -> Iterator[str]:
    """Files of a bundle that its manifest lists: all but itself and the gates' results."""
    for name in regular_files(root):
        if not name.startswith(f"{GATES}/") and name != MANIFEST:
            yield name
