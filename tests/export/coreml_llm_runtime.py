"""What CoreML-LLM's Swift runtime does around its packages, in numpy: masks, rotary rows, caches.

Its rules as they are (`ChunkedEngine.swift` at 72178c6), right and wrong: one causal mask in
prefill, a sliding mask in verify that hides no later draft, cache writes by the host.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
Call = Callable[[str, str, Arrays], Arrays]
"""`call(package, function, inputs)`: its outputs."""
HIDDEN = -np.inf
WIDTH = 512
S, F = "sliding", "full"


@dataclass
class Runtime:
    """A session. `kinds` of the layers that have caches, `first` of them in the first chunk."""

    call: Call
    chunks: tuple[str, ...]
    decode_function: str
    embed: Callable[[int], np.ndarray]
    raw: Callable[[int], np.ndarray]
    rotary: Arrays
    context: int
    window: int
    kinds: list[str]
    first: int
    dims: dict[str, int]
    prefill_tokens: int = 0

    def __post_init__(self) -> None:
        self.position = 0
        parts = self.kinds[: self.first], self.kinds[self.first :]
        self.caches = {
            (chunk, f"{p}_{kind}_in"): np.zeros((own.count(kind), 1, self.length(kind), WIDTH))
            for chunk, own in zip(self.chunks, parts, strict=False)
            for kind in (S, F)
            for p in "KV"
            if own.count(kind)
        }
        self.staged: dict[tuple[str, str], np.ndarray] = {}
        self.drafts: list[int] = []

    def length(self, kind: str) -> int:
        return self.window if kind == S else self.context

    def rows(self, start: int, count: int) -> Arrays:
        return {
            f"{p}_{letter}": self.rotary[f"{p}_{kind}"][start : start + count][None, None]
            for kind, letter in ((S, "s"), (F, "f"))
            for p in ("cos", "sin")
        }

    def tokens(self, ids: list[int], width: int) -> Arrays:
        def padded(rows: list[np.ndarray]) -> np.ndarray:
            found = np.zeros((1, width, rows[0].size))
            found[0, : len(rows)] = np.stack(rows)
            return found

        return {
            "hidden_states": padded([self.embed(i) for i in ids]),
            "per_layer_raw": padded([self.raw(i) for i in ids]),
        }

    def run(self, packages: tuple[str, ...], function: str, flow: Arrays) -> Arrays:
        """All packages in turn; a later one gets what an earlier one hands on."""
        outputs: Arrays = {}
        for index, package in enumerate(packages):
            own = {
                name: value
                for (chunk, name), value in self.caches.items()
                if chunk == package
            }  # fmt: skip
            outputs = self.call(package, function, flow | own)
            self.keep(index, package, function, outputs)
            flow = flow | {n: v for n, v in outputs.items() if n.startswith("kv1")}
            if "hidden_states_out" in outputs:
                flow["hidden_states"] = outputs["hidden_states_out"]
            if "per_layer_combined_out" in outputs:
                flow["per_layer_combined"] = outputs["per_layer_combined_out"]
        return outputs

    def keep(self, index: int, package: str, function: str, outputs: Arrays) -> None:
        for name, value in outputs.items():
            if name.startswith(("K_", "V_")):
                self.caches[package, name.replace("_out", "_in")] = value
            elif name.startswith("new_"):
                self.staged[package, f"{name.removeprefix('new_')}_in"] = value
        if package.startswith("prefill") and index < 2:
            self.write_prefill(index, outputs)

    def decode(self, token: int) -> tuple[int, float]:
        p, c, w = self.position, self.context, self.window
        flow = self.tokens([token], 1) | self.rows(p, 1)
        flow["causal_mask_full"] = np.where(np.arange(c) <= p, 0, HIDDEN)[None, None, None]
        seen = np.arange(w) >= w - min(p + 1, w)
        flow["causal_mask_sliding"] = np.where(seen, 0, HIDDEN)[None, None, None]
        flow["update_mask"] = (np.arange(c) == p)[None, None, :, None]
        outputs = self.run(self.chunks, self.decode_function, flow)
        self.position += 1
        return int(outputs["token_id"].reshape(-1)[0]), float(outputs["token_logit"].reshape(-1)[0])

    def prefill(self, ids: list[int]) -> tuple[int, float]:
        self.position, n = 0, self.prefill_tokens
        self.real = len(ids)
        flow = self.tokens(ids, n) | self.rows(0, n)
        order = np.arange(n)
        flow["causal_mask"] = np.where(order <= order[:, None], 0, HIDDEN)[None, None]
        flow["last_position_mask"] = (order == self.real - 1)[None, :, None]
        outputs = self.run(tuple(f"prefill_chunk{i}" for i in (1, 2, 3, 4)), "main", flow)
        self.position = self.real
        return int(outputs["token_id"].reshape(-1)[0]), float(outputs["token_logit"].reshape(-1)[0])

    def write_prefill(self, index: int, outputs: Arrays) -> None:
        """The last rows right-aligned for windows, all rows for full layers."""
        own = self.kinds[: self.first] if index == 0 else self.kinds[self.first :]
        producers = {len(own) - 1 - own[::-1].index(kind): kind for kind in set(own)}
        number, slots = 0, {S: 0, F: 0}
        for layer, kind in enumerate(own):
            shared = index == 1 and layer in producers
            for p in "KV":
                name = f"kv{13 if kind == S else 14}_{p.lower()}" if shared else f"{p}{number}"
                rows, dim = outputs[name][0, 0, : self.real], self.dims[kind]
                cache = self.caches[self.chunks[index], f"{p}_{kind}_in"]
                if kind == S:
                    rows = rows[-self.window :]
                    cache[slots[kind], 0, self.window - len(rows) :, :dim] = rows
                else:
                    cache[slots[kind], 0, : len(rows), :dim] = rows
            number += not shared
            slots[kind] += 1

    def verify(self, drafts: list[int]) -> list[int]:
        """The choice after each draft; nothing is written."""
        p, k, c, w = self.position, len(drafts), self.context, self.window
        query = np.arange(k)[:, None]
        flow = self.tokens(drafts, k) | self.rows(p, k)
        flow["causal_mask_full"] = np.where(np.arange(c) <= p + query, 0, HIDDEN)[None, None]
        seen = np.arange(w) >= w - np.minimum(p + query + 1, w)
        flow["causal_mask_sliding"] = np.where(seen, 0, HIDDEN)[None, None]
        flow["update_indicator"] = (np.arange(c)[:, None] == p + query.T)[None, None]
        self.drafts = drafts
        outputs = self.run(self.chunks, "verify_qK", flow)
        return [int(token) for token in outputs["token_ids"].reshape(-1)]

    def commit(self, count: int) -> None:
        """Write the first columns of the drafts that were verified."""
        for (chunk, name), new in self.staged.items():
            cache, kept = self.caches[chunk, name], new[:, :, :count]
            dim = kept.shape[3]
            if S in name:
                cache = np.roll(cache, -count, axis=2)
                cache[:, :, self.window - count :] = 0
                cache[:, :, self.window - count :, :dim] = kept
                self.caches[chunk, name] = cache
            else:
                cache[:, :, self.position : self.position + count, :dim] = kept
        self.position += count


def given(function: Any, inputs: Arrays) -> Arrays:
    """What a function takes of what the runtime has, in its shapes."""
    return {
        name: np.asarray(inputs[name], np.float32).reshape(tuple(shape))
        for name, shape in function.items()
    }
