"""CoreML-LLM's runtime as it is, in numpy: what it does around its packages (`ChunkedEngine.swift`
at 72178c6).

Its rules are kept, right and wrong: one causal mask in prefill, and a sliding mask in verify that
hides no later draft.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from cetane.export.coreml_llm.app_folder import LETTERS, AppFolder, Array, Arrays
from cetane.export.coreml_llm.contract import (
    DECODE,
    LAST_POSITION,
    PREFILL,
    SHARED,
    SLIDING,
    VERIFY,
    WIDTH,
)

HIDDEN = -np.inf


class CachePlace(NamedTuple):
    """Where a layer's keys and values are: in which chunk's caches, and in which row of them."""

    chunk: str
    kind: str
    row: int


class Chosen(NamedTuple):
    """The token that the head chose, and its logit."""

    token: int
    logit: float


class AppHost:
    """A conversation."""

    def __init__(self, folder: AppFolder) -> None:
        self.folder = folder
        self.position = 0
        layers = Counter((place.chunk, place.kind) for place in self.places)
        self.caches = {
            (chunk, f"{part}_{kind}_in"): np.zeros(
                (count, folder.heads, self.length(kind), WIDTH), np.float32
            )
            for (chunk, kind), count in layers.items()
            for part in "KV"
        }
        self.verified: dict[tuple[str, str], Array] = {}
        """The columns of the last call that verified, by cache."""

    @cached_property
    def places(self) -> list[CachePlace]:
        """The places of all layers that have caches, in order."""
        made: list[CachePlace] = []
        folder, kinds = self.folder, iter(self.folder.kinds)
        for chunk, count in zip(folder.chunks, folder.owned, strict=True):
            rows = dict.fromkeys(LETTERS, 0)
            for kind in (next(kinds) for _ in range(count)):
                made.append(CachePlace(chunk, kind, rows[kind]))
                rows[kind] += 1
        return made

    def length(self, kind: str) -> int:
        return self.folder.window if kind == SLIDING else self.folder.context

    def decode(self, token: int) -> Chosen:
        """Feed one token."""
        p, c, w = self.position, self.folder.context, self.folder.window
        flow = self.tokens([token], 1) | self.angles(p, 1)
        flow["causal_mask_full"] = hidden(np.arange(c) > p)
        flow["causal_mask_sliding"] = hidden(np.arange(w) < w - min(p + 1, w))
        flow["update_mask"] = np.arange(c) == p
        function = DECODE if self.folder.verify_tokens else "main"
        made = self.run(self.folder.chunks, function, flow)
        self.position += 1
        return chosen(made)

    def prefill(self, ids: Sequence[int]) -> Chosen:
        """Begin with the tokens of a prompt, in one call."""
        count = self.folder.prefill_tokens
        order = np.arange(count)
        flow = self.tokens(ids, count) | self.angles(0, count)
        flow["causal_mask"] = hidden(order > order[:, None])
        flow[LAST_POSITION] = order == len(ids) - 1
        self.position = len(ids)
        return chosen(self.run(PREFILL, "main", flow))

    def verify(self, drafts: Sequence[int]) -> list[int]:
        """The choice after each draft; `commit` writes."""
        p, c, w = self.position, self.folder.context, self.folder.window
        query = np.arange(len(drafts))[:, None]
        flow = self.tokens(drafts, len(drafts)) | self.angles(p, len(drafts))
        flow["causal_mask_full"] = hidden(np.arange(c) > p + query)
        flow["causal_mask_sliding"] = hidden(np.arange(w) < w - np.minimum(p + query + 1, w))
        flow["update_indicator"] = np.arange(c)[:, None] == p + query.T
        made = self.run(self.folder.chunks, VERIFY, flow)
        return [int(token) for token in made["token_ids"].reshape(-1)]

    def commit(self, count: int) -> None:
        """Write the first columns of the drafts that were verified."""
        for key, new in self.verified.items():
            cache, kept = self.caches[key], new[:, :, :count]
            if SLIDING in key[1]:
                cache = self.caches[key] = np.roll(cache, -count, axis=2)
                at = slice(self.folder.window - count, None)
            else:
                at = slice(self.position, self.position + count)
            cache[:, :, at] = 0
            cache[:, :, at, : kept.shape[3]] = kept
        self.position += count

    def tokens(self, ids: Sequence[int], width: int) -> Arrays:
        """Rows of the tables, padded with zeros: `(width, channels)`."""

        def padded(table: Callable[[int], Array]) -> Array:
            rows = np.stack([table(token) for token in ids])
            return np.pad(rows, ((0, width - len(ids)), (0, 0)))

        return {
            "hidden_states": padded(self.folder.embed),
            "per_layer_raw": padded(self.folder.per_layer),
        }

    def angles(self, start: int, count: int) -> Arrays:
        """Rotary rows of the next positions."""
        return {
            f"{part}_{letter}": self.folder.rotary[f"{part}_{kind}"][start : start + count]
            for kind, letter in LETTERS.items()
            for part in ("cos", "sin")
        }

    def run(self, packages: Sequence[str], function: str, flow: Arrays) -> Mapping[str, Array]:
        """Run all packages in turn: what the last one gives. A later one gets what an earlier one
        hands on."""
        made: Mapping[str, Array] = {}
        for index, package in enumerate(packages):
            own = {name: cache for (chunk, name), cache in self.caches.items() if chunk == package}
            made = self.folder.call(package, function, flow | own)
            for name, value in made.items():
                if name.startswith(("K_", "V_")):
                    self.caches[package, name.replace("_out", "_in")] = value
                elif name.startswith("new_"):
                    self.verified[package, f"{name.removeprefix('new_')}_in"] = value
            if package in PREFILL[:2]:
                self.keep(index, made)
            flow = flow | {
                name.removesuffix("_out"): value
                for name, value in made.items()
                if name.startswith((*SHARED.values(), "hidden_states", "per_layer_combined"))
            }
        return made

    def keep(self, index: int, made: Mapping[str, Array]) -> None:
        """Write the keys and values of a package that prefills: the last ones right-aligned for a
        window, all for full layers."""
        cut, count = self.folder.prefilled, self.position
        places = self.places[:cut] if index == 0 else self.places[cut:]
        last = {place.kind: number for number, place in enumerate(places)}
        numbered = 0
        for number, place in enumerate(places):
            handed_on = index == 1 and last[place.kind] == number
            for part in "KV":
                name = f"{SHARED[place.kind]}_{part.lower()}" if handed_on else f"{part}{numbered}"
                rows = made[name][0, :, :count]
                at = slice(0, count)
                if place.kind == SLIDING:
                    rows = rows[:, -self.folder.window :]
                    at = slice(self.folder.window - rows.shape[1], None)
                cache = self.caches[place.chunk, f"{part}_{place.kind}_in"]
                cache[place.row, :, at, : rows.shape[2]] = rows
            numbered += not handed_on


def hidden(unseen: Array) -> Array:
    """A mask that hides some keys."""
    return np.where(unseen, HIDDEN, 0.0)


def chosen(made: Mapping[str, Array]) -> Chosen:
    """What a head chose."""
    return Chosen(int(made["token_id"].reshape(-1)[0]), float(made["token_logit"].reshape(-1)[0]))
