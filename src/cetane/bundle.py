"""The folder that ships: manifest, shards, embedding, rotary tables, tokenizer, gate results.

A bundle is written under `NAME.partial` and renamed when its manifest is complete. Reading one
trusts nothing: every file is inside the folder, listed, and has the size and hash it should.

Draft heads (`bundle_heads.py`) come and go after that: each is a folder with a manifest of its own,
bound to the digest of the manifest here, which does not name them.
"""

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from pydantic import ValidationError

from cetane.bundle_heads import HeadKind, HeadShard, listed_files, open_heads
from cetane.checkpoint import Tokenizer
from cetane.errors import CetaneError
from cetane.families.flow import Data
from cetane.listed import FileRecord, check_files, inside, sha256
from cetane.plan import Function, Plan, TablePlan

SCHEMA = 3
MANIFEST = "manifest.json"
GATES = "gates"
TOKENIZER = "tokenizer"
PRODUCERS = ("cetane", "coremltools", "torch", "transformers")
FULL = (os.strerror(errno.ENOSPC), "[MIL FileWriter]", "filesystem error: cannot copy")
"""What coremltools says on a full disk: it loses the error number, in shutil and in C++."""


class Rows(Protocol):
    """A table of rows by token, in memory or not."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def __getitem__(self, tokens: Any, /) -> np.ndarray[Any, Any]: ...


@dataclass(frozen=True)
class Tables:
    """Host tables: `tokens (V, C)`, the embedding, unless a shard holds it; `rotary[name] (2,
    context, D)` fp32, and further tables of rows by token; memory-mapped."""

    tokens: Rows | None
    rotary: dict[str, np.ndarray[Any, Any]]
    others: dict[str, Rows] = field(default_factory=dict)

    @property
    def embedding(self) -> Rows:
        """Rows of the embedding; CetaneError if a shard holds it."""
        if self.tokens is None:
            raise CetaneError(
                "this bundle has no table of the embedding: its first shard holds it",
                "port without embedding.inside",
            )
        return self.tokens

    def rows(self, name: str) -> Rows:
        """A table by its name in the plan."""
        return self.embedding if name == "tokens" else self.others[name]


class QuantizedRows:
    """int8 rows `(V, C)`, each with an fp16 scale: row = values * scale / 127."""

    def __init__(self, values: np.ndarray[Any, Any], scales: np.ndarray[Any, Any]) -> None:
        self.values, self.scales = values, scales

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def __getitem__(self, tokens: Any) -> np.ndarray[Any, Any]:
        """fp32 rows of some tokens."""
        scales = np.asarray(self.scales[tokens], np.float32) / 127
        found: np.ndarray[Any, Any] = self.values[tokens] * scales[..., None]
        return found


def quantize_rows(
    rows: np.ndarray[Any, Any],
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """int8 values and fp16 scales, the largest magnitude of each row: CoreML-LLM's own form."""
    scales = np.abs(rows).max(axis=-1).astype(np.float16)
    steps = np.where(scales == 0, 1, scales).astype(np.float32)[:, None] / 127
    return np.clip(np.rint(rows / steps), -127, 127).astype(np.int8), scales


class Manifest(Data):
    """Everything a runtime needs to know. Paths are relative to the bundle."""

    schema_version: int = SCHEMA
    producer: dict[str, str]
    source: str
    """The checkpoint as it was named; gates compare with it unless told otherwise."""
    fingerprint: str
    """The checkpoint's content, as far as headers, sizes and dates tell."""
    plan: Plan
    files: dict[str, FileRecord]


def shard_path(name: str) -> str:
    return f"shards/{name}.mlpackage"


def table_path(name: str) -> str:
    """Rows by token; a quantised table has its scales in a file of its own."""
    return "embedding.npy" if name == "tokens" else f"embedding-{name}.npy"


def scales_path(name: str) -> str:
    return table_path(name).replace(".npy", "-scales.npy")


def rotary_path(table: str) -> str:
    return f"rotary-{table}.npy"


def producers() -> dict[str, str]:
    """Versions of what makes a bundle."""
    return {name: version(name) for name in PRODUCERS}


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
        self.manifest = self._read_manifest(file)

    def _read_manifest(self, file: Path) -> Manifest:
        try:
            content = json.loads(file.read_bytes())
            if content["schema_version"] != SCHEMA:
                raise CetaneError(
                    f"{file}: schema {content['schema_version']}, this cetane reads {SCHEMA}",
                    "port the model again",
                )
            manifest = Manifest.model_validate(content)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise CetaneError(f"{file}: {where}: {first['msg']}") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CetaneError(f"{file}: not a manifest: {error!r}") from error
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
        found = {name: self._rows(name, table) for name, table in plan.tables.items()}
        rotary = {name: self._array(rotary_path(name)) for name in plan.rotary}
        for name, table in rotary.items():
            if table.ndim != 3 or table.shape[:2] != (2, plan.recipe.cache.context):
                raise CetaneError(f"{self.path}: {rotary_path(name)} has shape {table.shape}")
        return Tables(found.pop("tokens", None), rotary, found)

    def _rows(self, name: str, table: TablePlan) -> Rows:
        rows = self._array(table_path(name))
        if rows.shape != (table.rows, table.channels):
            raise CetaneError(f"{self.path}: {table_path(name)} has shape {rows.shape}")
        if self.plan.recipe.embedding.format == "fp16":
            return rows
        scales = self._array(scales_path(name))
        if rows.dtype != np.int8 or scales.shape != (table.rows,):
            raise CetaneError(f"{self.path}: {scales_path(name)} does not fit {table_path(name)}")
        return QuantizedRows(rows, scales)

    def _array(self, name: str) -> np.ndarray[Any, Any]:
        try:
            return np.lib.format.open_memmap(self.file(name), mode="r")
        except (OSError, ValueError) as error:
            raise CetaneError(f"{self.path}: {name}: {error}") from error

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.file(TOKENIZER))

    def write_gate(self, name: str, result: dict[str, Any]) -> None:
        """Store a gate's result, tied to this bundle by its digest."""
        folder = self.file(GATES)
        with disk_errors(folder):
            folder.mkdir(exist_ok=True)
            write_json(folder / f"{name}.json", {"bundle": self.digest} | result)

    def gates(self) -> dict[str, dict[str, Any]]:
        """Stored gate results by gate name; those of another build are left out, and so are those
        that judged `heads` (digests by kind) which have been trained again."""
        results = {}
        heads = {kind: head.digest for kind, head in self.heads().items()}
        for path in sorted(self.file(GATES).glob("*.json")):
            try:
                result = json.loads(path.read_bytes())
            except ValueError as error:
                raise CetaneError(f"{path}: not a gate result: {error}") from error
            if not isinstance(result, dict) or result.get("bundle") != self.digest:
                continue
            judged = result.get("heads", {})
            if isinstance(judged, dict) and judged.items() <= heads.items():
                results[path.stem] = result
        return results


def relative_files(root: Path) -> Iterator[str]:
    """Files of a bundle that its manifest lists: all but itself and the gates' results."""
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root)
        if path.is_file() and name.parts[0] != GATES and name.as_posix() != MANIFEST:
            yield name.as_posix()


def write_json(path: Path, content: Any) -> None:
    """Write JSON under a temporary name, then rename: a reader sees all of it or nothing."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path that takes the place of `path` when the block ends well."""
    temporary = path.with_name(f".{path.name}.tmp")
    remove(temporary)
    try:
        yield temporary
        if temporary.is_dir():  # a folder does not replace one that holds something
            remove(path)
        os.replace(temporary, path)
    finally:
        remove(temporary)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a full disk, and whatever else the file system refuses, into a CetaneError."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        code = error.errno if isinstance(error, OSError) else None
        if code == errno.ENOSPC or any(text in str(error) for text in FULL):
            hint = f"free some space there and in {tempfile.gettempdir()}, then run it again"
            raise CetaneError(f"disk full while writing {path}", f"{hint}: it resumes") from error
        if isinstance(error, OSError):
            raise CetaneError(f"cannot write {path}: {error}") from error
        raise
