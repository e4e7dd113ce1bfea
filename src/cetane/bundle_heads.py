"""Draft heads of a bundle: shards that were trained after it, for it.

`heads/KIND/` has a manifest of its own, `head.json`, which lists every other file there and names
the digest of the bundle whose hidden states the head reads: another bundle refuses it. The bundle's
manifest does not know of heads, so its digest stays what it is when one is added or replaced.
"""

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from pydantic import Field, ValidationError, model_validator

from cetane.errors import CetaneError
from cetane.families.caches import Slots
from cetane.families.flow import (
    Data,
    Embedding,
    FromCache,
    FromTensor,
    Mask,
    Rotary,
    ToCache,
    ToTensor,
)
from cetane.listed import FileRecord, check_files, inside, sha256
from cetane.plan import Function, Plan, check_caches

HeadKind = Literal["medusa", "eagle3"]
KINDS: tuple[HeadKind, ...] = get_args(HeadKind)
HEADS, MANIFEST, SCHEMA = "heads", "head.json", 1
SOURCE, VOCABULARY, ROTARY, HELD_OUT = (
    "source.safetensors", "vocabulary.npy", "rotary-default.npy", "held-out.npy",
)  # fmt: skip
"""What was trained, in fp16; the tokens it can propose; windows of text that it has not seen."""
TRAIN_AGAIN = "cetane train-head makes one for it"


class Training(Data):
    """What a head learned from, and how it did on windows that were held out."""

    data: dict[str, str]
    """sha256 of every text, by the name of its file."""
    windows: int
    length: int
    """Tokens of a window."""
    held_out: int
    positions: int
    """Drafts that were judged."""
    top1: tuple[float, ...]
    """Share of right tokens at every place of a draft."""
    accepted: tuple[float, ...]
    """Share of drafts that are right up to this place."""


class HeadManifest(Data):
    """Everything a runtime needs to know of a head. Paths are relative to its folder."""

    schema_version: int = SCHEMA
    producer: dict[str, str]
    kind: HeadKind
    bundle: str
    """Digest of the bundle's manifest."""
    rows: int = Field(ge=1, le=2**20)
    """Tokens that it can propose: row i of its logits is about token i of the vocabulary's file."""
    steps: int = Field(ge=1, le=16)
    """Tokens that it was trained to draft."""
    taps: tuple[str, ...] = Field(min_length=1, max_length=3)
    """Shards of the bundle after which it reads the hidden state, the input's channels in order."""
    caches: dict[str, Slots]
    """Of its own, by group; in a draft its columns count for that draft only."""
    weight_bytes: int
    functions: tuple[Function, ...]
    training: Training
    files: dict[str, FileRecord]

    @model_validator(mode="after")
    def consistent(self) -> "HeadManifest":
        """What a drafter relies on; a manifest may be hostile."""
        names = [function.name for function in self.functions]
        needed = {"draft"} if self.kind == "medusa" else {"draft", "follow"}
        if len(names) != len(set(names)) or not needed <= set(names):
            raise ValueError(f"a {self.kind} head with the functions {', '.join(names)}")
        check_caches(self.caches, self.functions)
        if any(slots.contract != "readonly" or slots.limited for slots in self.caches.values()):
            raise ValueError("a head's caches are readonly, for the whole context")
        for function in self.functions:
            self.check(function)
        return self

    def check(self, function: Function) -> None:
        """ValueError for what a drafter cannot supply, or has no place for."""
        known = Embedding(), *(Rotary(table="default", part=part) for part in ("cos", "sin"))
        for item in function.inputs:
            source = item.source
            tensor = isinstance(source, FromTensor) and source.name in ("features", "hidden")
            if not (tensor or isinstance(source, Mask | FromCache) or source in known):
                raise ValueError(f"{function.name}: nothing gives {item.name}")
        kept = {i.source.name for i in function.inputs if isinstance(i.source, FromCache)}
        cached = {i.source.name for f in self.functions for i in f.inputs
                  if isinstance(i.source, FromCache)}  # fmt: skip
        for output in function.outputs:
            sink = output.sink
            tensor = isinstance(sink, ToTensor) and sink.name in ("logits", "hidden")
            append = isinstance(sink, ToCache) and sink.write == "append" and sink.name in cached
            if not (tensor or append):
                raise ValueError(f"{function.name}: {output.name} has no place to go")
        if kept and not any(isinstance(i.source, Mask) for i in function.inputs):
            raise ValueError(f"{function.name}: a cache without a mask")


class HeadShard:
    """A draft head in its folder. Opening checks the manifest; `verify` checks every file."""

    def __init__(self, path: Path, bundle: str, plan: Plan) -> None:
        """Of the bundle with this digest and plan."""
        self.path, self.plan = path, plan
        self.manifest = read_manifest(inside(path, MANIFEST))
        if self.manifest.bundle != bundle:
            raise CetaneError(f"{path}: the head was trained for another bundle", TRAIN_AGAIN)
        if path.name != self.manifest.kind:
            raise CetaneError(f"{path}: holds a head of the kind {self.manifest.kind}")
        for name in self.manifest.files:
            inside(path, name)

    @property
    def name(self) -> HeadKind:
        return self.manifest.kind

    @cached_property
    def digest(self) -> str:
        """sha256 of its manifest, which lists every file's hash."""
        return sha256(self.path / MANIFEST)

    def verify(self) -> None:
        """CetaneError if a file is missing or changed."""
        check_files(self.path, self.manifest.files, "train the head again")

    def file(self, name: str) -> Path:
        return inside(self.path, name)

    def shard(self, name: str) -> Path:
        """Its package; a head has only one, and its kind is the name."""
        return self.file(f"{name}.mlpackage")

    def functions(self, name: str) -> tuple[Function, ...]:
        return self.manifest.functions

    def vocabulary(self) -> np.ndarray[Any, Any]:
        """The tokens that it can propose, int32 `(R,)`, ascending."""
        found = self._array(VOCABULARY)
        if found.dtype != np.int32 or found.shape != (self.manifest.rows,):
            raise CetaneError(f"{self.path}: {VOCABULARY} is {found.dtype} {found.shape}")
        if found[0] < 0 or found[-1] >= self.plan.vocab or (np.diff(found) <= 0).any():
            raise CetaneError(f"{self.path}: {VOCABULARY} holds what are no tokens in order")
        return found

    def rotary(self) -> dict[str, np.ndarray[Any, Any]]:
        """Its rotary tables `(2, context, D)` fp32, by name; none where it has no use for one."""
        if ROTARY not in self.manifest.files:
            return {}
        found = self._array(ROTARY)
        if found.ndim != 3 or found.shape[:2] != (2, self.plan.recipe.cache.context):
            raise CetaneError(f"{self.path}: {ROTARY} has shape {found.shape}")
        return {"default": found}

    def held_out(self) -> np.ndarray[Any, Any]:
        """Windows of text `(W, n)` that it was not trained on, int32."""
        found = self._array(HELD_OUT)
        fits = found.ndim == 2 and len(found) and found.shape[1] >= 2 * self.manifest.steps
        if found.dtype != np.int32 or not fits:
            raise CetaneError(f"{self.path}: {HELD_OUT} is {found.dtype} {found.shape}")
        return found

    def _array(self, name: str) -> np.ndarray[Any, Any]:
        try:
            return np.lib.format.open_memmap(self.file(name), mode="r")
        except (OSError, ValueError) as error:
            raise CetaneError(f"{self.path}: {name}: {error}") from error


def read_manifest(file: Path) -> HeadManifest:
    """CetaneError for a manifest that is damaged or hostile."""
    try:
        content = json.loads(file.read_bytes())
        if content["schema_version"] != SCHEMA:
            raise CetaneError(
                f"{file}: schema {content['schema_version']}, this cetane reads {SCHEMA}",
                "train the head again",
            )
        return HeadManifest.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CetaneError(f"{file}: {where}: {first['msg']}") from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CetaneError(f"{file}: not a head's manifest: {error!r}") from error


def open_heads(root: Path, digest: str, plan: Plan) -> dict[HeadKind, HeadShard]:
    """The heads in a bundle's folder, by kind."""
    folders = {kind: inside(root, f"{HEADS}/{kind}") for kind in KINDS}
    return {kind: HeadShard(f, digest, plan) for kind, f in folders.items() if f.is_dir()}


def listed_files(heads: Sequence[HeadShard]) -> set[str]:
    """Paths, from the bundle's folder, of all that belongs to some heads."""
    return {
        f"{HEADS}/{head.name}/{name}" for head in heads for name in (MANIFEST, *head.manifest.files)
    }
