"""Draft heads of a bundle: shards that were trained after it, for it.

`heads/KIND/` has a manifest of its own, `head.json`, which lists every other file there and names
the digest of the bundle whose hidden states the head reads: another bundle refuses it. The bundle's
manifest does not know of heads, so its digest stays what it is when one is added or replaced.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from cetane.bundle.arrays import open_array
from cetane.errors import CetaneError
from cetane.files import check_files, inside, read_json, sha256
from cetane.schema.draft_head import (
    HEADS,
    HELD_OUT,
    KINDS,
    MANIFEST,
    ROTARY,
    SCHEMA,
    VOCABULARY,
    HeadKind,
    HeadManifest,
)
from cetane.schema.function import Function
from cetane.schema.manifest import check_schema
from cetane.schema.plan import Plan
from cetane.validation import validated

TRAIN_AGAIN = "cetane train-head makes one for it"


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
        tokens = open_array(self.file(VOCABULARY), "<i4", (self.manifest.rows,))
        if tokens[0] < 0 or tokens[-1] >= self.plan.vocab or (np.diff(tokens) <= 0).any():
            raise CetaneError(f"{self.path}: {VOCABULARY} holds what are no tokens in order")
        return tokens

    def rotary(self) -> dict[str, np.ndarray[Any, Any]]:
        """Its rotary tables `(2, context, D)` fp32, by name; none where it has no use for one."""
        if ROTARY not in self.manifest.files:
            return {}
        shape = (2, self.plan.recipe.cache.context, None)
        return {"default": open_array(self.file(ROTARY), "<f4", shape)}

    def held_out(self) -> np.ndarray[Any, Any]:
        """Windows of text `(W, n)` that it was not trained on, int32."""
        windows = open_array(self.file(HELD_OUT), "<i4", (None, None))
        if not len(windows) or windows.shape[1] < 2 * self.manifest.steps:
            raise CetaneError(f"{self.path}: {HELD_OUT} has shape {windows.shape}")
        return windows


def read_manifest(file: Path) -> HeadManifest:
    """CetaneError for a manifest that is damaged or hostile."""
    content = read_json(file, follow=False)
    check_schema(content, SCHEMA, file, "train the head again")
    return validated(HeadManifest, content, str(file))


def open_heads(root: Path, digest: str, plan: Plan) -> dict[HeadKind, HeadShard]:
    """The heads in a bundle's folder, by kind."""
    folders = {kind: inside(root, f"{HEADS}/{kind}") for kind in KINDS}
    return {kind: HeadShard(f, digest, plan) for kind, f in folders.items() if f.is_dir()}


def listed_files(heads: Sequence[HeadShard]) -> set[str]:
    """Paths, from the bundle's folder, of all that belongs to some heads."""
    return {
        f"{HEADS}/{head.name}/{name}" for head in heads for name in (MANIFEST, *head.manifest.files)
    }
