"""Draft heads of a bundle: shards that were trained for it, after it was built.

`heads/KIND/` has a manifest of its own, `head.json`, which lists every other file there. It names
the digest of the bundle whose hidden states the draft head reads; another bundle refuses it. The
bundle's manifest does not name its draft heads, so a new draft head keeps the bundle's digest.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cetane.bundle.listed import ListedFolder
from cetane.errors import CetaneError
from cetane.files import inside
from cetane.schema.draft_head import (
    FOLDER,
    HELD_OUT,
    KINDS,
    MANIFEST,
    ROTARY,
    SCHEMA,
    VOCABULARY,
    DraftHeadKind,
    DraftHeadManifest,
    tappable,
)
from cetane.schema.function import Function
from cetane.schema.plan import Plan

if TYPE_CHECKING:  # a bundle is opened without numpy
    import numpy as np

MAKE_AGAIN = (
    "remove the draft head's folder; cetane train-head or cetane add-head makes another one"
)
"""The hint begins with "remove": no command opens a bundle with a draft head that does not fit it,
not even `train-head`."""


class DraftHeadFolder(ListedFolder[DraftHeadManifest]):
    """The folder of a draft head, which may be outside its bundle."""

    manifest_name, schema, hint = MANIFEST, SCHEMA, MAKE_AGAIN

    def __init__(self, path: Path) -> None:
        super().__init__(path, DraftHeadManifest)


class DraftHead(DraftHeadFolder):
    """A draft head of a bundle, in its folder."""

    def __init__(self, path: Path, bundle: str, plan: Plan) -> None:
        """Open the draft head at `path`, of the bundle with this digest and plan."""
        super().__init__(path)
        self.plan = plan
        if self.manifest.bundle != bundle:
            raise CetaneError(f"{path}: the draft head was trained for another bundle", MAKE_AGAIN)
        if path.name != self.manifest.kind:
            raise CetaneError(f"{path} holds a draft head of another kind: {self.manifest.kind}")
        unknown = [tap for tap in self.manifest.taps if tap not in tappable(plan)]
        if unknown:
            raise CetaneError(
                f"{path}: the draft head reads {unknown[0]!r}, but no shard of the bundle has that"
                " name and hands on a hidden state",
                MAKE_AGAIN,
            )

    @property
    def name(self) -> DraftHeadKind:
        return self.manifest.kind

    def shard(self, name: str) -> Path:
        """The package of its one shard, which has the name of its kind."""
        return self.file(f"{name}.mlpackage")

    def functions(self, name: str) -> tuple[Function, ...]:
        """The functions of its shard."""
        return self.manifest.functions

    def vocabulary(self) -> np.ndarray[Any, Any]:
        """The tokens that it can propose, int32 `(R,)`, ascending."""
        tokens = self.array(VOCABULARY, "<i4", (self.manifest.rows,))
        if tokens[0] < 0 or tokens[-1] >= self.plan.vocab or (tokens[1:] <= tokens[:-1]).any():
            raise CetaneError(f"{self.path}: {VOCABULARY} does not hold ascending tokens")
        return tokens

    def rotary(self) -> dict[str, np.ndarray[Any, Any]]:
        """Its rotary tables `(2, context, D)` fp32, by name; none for a kind without positions."""
        if ROTARY not in self.manifest.files:
            return {}
        shape = (2, self.plan.recipe.cache.context, None)
        return {"default": self.array(ROTARY, "<f4", shape)}

    def held_out(self) -> np.ndarray[Any, Any]:
        """Windows of text that had no part in its training, int32 `(W, n)`."""
        return open_windows(self.file(HELD_OUT), self.manifest.steps)


LONGEST_WINDOW = 1 << 20
"""The most tokens of a window. A file with holes costs nothing, and its windows are read whole."""


def open_windows(path: Path, steps: int) -> np.ndarray[Any, Any]:
    """Windows of text, int32 `(W, n)`, memory-mapped. CetaneError if there is none, or if they are
    too short for two drafts of `steps` tokens, or longer than any text that a model reads."""
    import numpy as np

    from cetane.npy import open_array

    windows = np.asarray(open_array(path, "<i4", (None, None)))
    if not len(windows) or not 2 * steps <= windows.shape[1] <= LONGEST_WINDOW:
        raise CetaneError(f"{path}: windows of a wrong shape, {windows.shape}")
    return windows


def open_draft_heads(root: Path, digest: str, plan: Plan) -> dict[DraftHeadKind, DraftHead]:
    """The draft heads in a bundle's folder, by kind."""
    folders = {kind: inside(root, f"{FOLDER}/{kind}") for kind in KINDS}
    return {kind: DraftHead(f, digest, plan) for kind, f in folders.items() if f.is_dir()}


def listed_files(draft_heads: Sequence[DraftHead]) -> set[str]:
    """The paths, from the bundle's folder, of all files of these draft heads."""
    return {
        f"{FOLDER}/{draft_head.name}/{name}"
        for draft_head in draft_heads
        for name in (MANIFEST, *draft_head.manifest.files)
    }
