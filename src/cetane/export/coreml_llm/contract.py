"""The contract: names and shapes of the tensors between CoreML-LLM's runtime and its packages, and
what they say of a folder."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cetane.mil import MilFunction
from cetane.schema.recipe import Mode

CHUNKS = {
    1: ("merged_full",),
    2: ("merged_chunk1", "merged_chunk2"),
    3: ("chunk1", "chunk2_3way", "chunk3_3way"),
    4: ("chunk1", "chunk2", "chunk3", "chunk4"),
}
"""Names of the packages that decode, by their number. Their runtime takes the first of these
layouts whose packages are there; it had the merged ones until commit 820a5b4."""
VERIFYING = (3, 4)
"""The layouts whose packages also verify."""
PREFILL = ("prefill_chunk1", "prefill_chunk2", "prefill_chunk3", "prefill_chunk4")
"""Names of the prefill packages: always four."""
DECODE, VERIFY = "decode_q1", "verify_qK"
"""The functions of a package that decodes and verifies. A package that only decodes has `main`."""
WIDTH = 512
"""Channels of keys and values in caches, for attention heads of any width."""
NAMES = {
    "hidden": "hidden_states",
    "mask_full": "causal_mask_full",
    "mask_sliding": "causal_mask_sliding",
    "full_write": "update_mask",
    "cos_sliding": "cos_s",
    "sin_sliding": "sin_s",
    "cos_full": "cos_f",
    "sin_full": "sin_f",
    "per_layer_tokens": "per_layer_raw",
    "per_layer": "per_layer_combined",
    "shared_sliding_k": "kv13_k",
    "shared_sliding_v": "kv13_v",
    "shared_full_k": "kv14_k",
    "shared_full_v": "kv14_v",
    **{f"{g}_{p}": f"{p.upper()}_{g}_in" for g in ("sliding", "full") for p in "kv"},
}
"""Their names of inputs in decoding, by cetane's names."""
OTHERS: dict[Mode, dict[str, str]] = {
    "decode": {},
    "verify": {"full_write": "update_indicator"},
    "prefill": {"mask_full": "causal_mask", "mask_sliding": "causal_mask"},
}
"""Their names in the other modes, where they differ."""
SLIDING, FULL = "sliding", "full"
KINDS = {"sliding_attention": SLIDING, "full_attention": FULL}
"""Kinds of layers by their names in `model_config.json`."""
COMMITTED = [{SLIDING: 7, FULL: 1}, {SLIDING: 5, FULL: 2}]
"""The caches of the first two packages into which the runtime writes the columns that were
verified: their numbers, those of E2B, are constants of `ChunkedEngine.swift`."""
SHARED = {SLIDING: "kv13", FULL: "kv14"}
LAST_POSITION = "last_position_mask"


def theirs(name: str, mode: Mode) -> str:
    """Their name of an input or output, except prefill's keys and values."""
    if not name.endswith("_out"):
        return OTHERS[mode].get(name, NAMES[name])
    inner = NAMES[name.removesuffix("_out")]
    if inner.startswith(tuple(SHARED.values())):  # handed on under one name
        return inner
    base = inner.removesuffix("_in")
    return f"new_{base}" if mode == "verify" and base != inner else f"{base}_out"


def commits(owned: Sequence[Mapping[str, int]]) -> bool:
    """Whether the runtime writes all columns that were verified, for the caches of each package."""
    return list(owned[:2]) == COMMITTED


def is_cache(name: str) -> bool:
    """Whether a tensor holds keys or values, padded to the width of caches."""
    return name.startswith(("K_", "V_"))


@dataclass(frozen=True)
class PackageSizes:
    """The sizes in `model_config.json`."""

    hidden: int
    context: int
    window: int
    per_layer: int
    """Channels of all layers together."""
    kv_heads: int
    dims: dict[str, int]
    """Channels of an attention head, by kind of layer."""

    def length(self, kind: str) -> int:
        """The number of keys in a cache."""
        return self.window if kind == SLIDING else self.context

    def seen(self, kind: str, mode: Mode, tokens: int) -> int:
        """The number of keys that a layer with shared keys sees.

        In a window of W, a verify call of K tokens sees W + K keys. With only W, its first query
        would lose K - 1 keys that it must see.
        """
        if mode == "prefill":
            return tokens
        return self.length(kind) + (tokens if mode == "verify" and kind == SLIDING else 0)

    def inputs(self, mode: Mode, tokens: int, owned: dict[str, int]) -> dict[str, tuple[int, ...]]:
        """The shapes of all possible inputs; `owned` layers of each kind have caches in it."""
        keys = tokens if mode == "prefill" else 0
        wide = (1, tokens, self.per_layer)
        shapes: dict[str, tuple[int, ...]] = {
            "hidden_states": (1, tokens, self.hidden),
            theirs("mask_full", mode): (1, 1, tokens, keys or self.context),
            theirs("mask_sliding", mode): (1, 1, tokens, keys or self.window),
            "per_layer_raw": wide,
            "per_layer_combined": wide,
        }
        for kind, letter in ((SLIDING, "s"), (FULL, "f")):
            for part in ("cos", "sin"):
                shapes[f"{part}_{letter}"] = (1, 1, tokens, self.dims[kind])
            for part in "kv":
                shapes[f"{SHARED[kind]}_{part}"] = self.shared(kind, mode, tokens)
        if mode == "prefill":
            return shapes | {LAST_POSITION: (1, tokens, 1)}
        shapes[theirs("full_write", mode)] = (1, 1, self.context, tokens)
        for kind, layers in owned.items():
            for part in "KV":
                shapes[f"{part}_{kind}_in"] = (layers, self.kv_heads, self.length(kind), WIDTH)
        return shapes

    def outputs(self, mode: Mode, tokens: int, owned: dict[str, int]) -> dict[str, tuple[int, ...]]:
        """The shapes of all possible outputs, but for prefill's keys and values of each layer."""
        ids = (1, tokens) if mode == "verify" else (1,)
        shapes: dict[str, tuple[int, ...]] = {
            "hidden_states_out": (1, tokens, self.hidden),
            "per_layer_combined_out": (1, tokens, self.per_layer),
            ("token_ids" if mode == "verify" else "token_id"): ids,
        }
        if mode != "verify":
            shapes["token_logit"] = (1,)
        for kind in (SLIDING, FULL):
            for part in "kv":
                shapes[f"{SHARED[kind]}_{part}"] = self.shared(kind, mode, tokens)
            for part in "KV":
                if mode == "decode" and kind in owned:
                    shape = (owned[kind], self.kv_heads, self.length(kind), WIDTH)
                    shapes[f"{part}_{kind}_out"] = shape
                if mode == "verify" and kind in owned:
                    shape = (owned[kind], self.kv_heads, tokens, self.dims[kind])
                    shapes[f"new_{part}_{kind}"] = shape
        return shapes

    def shared(self, kind: str, mode: Mode, tokens: int) -> tuple[int, ...]:
        """The shape of keys or values that a layer hands on."""
        return (1, self.kv_heads, self.seen(kind, mode, tokens), self.dims[kind])


def positions(context: int) -> int:
    """The number of rows of a rotary table for a context."""
    return max(2 * context, 4096)


def is_there(folder: Path, name: str) -> bool:
    """Whether a folder has a package, perhaps one that a Mac has compiled."""
    return (folder / f"{name}.mlpackage").is_dir() or is_compiled(folder, name)


def is_compiled(folder: Path, name: str) -> bool:
    compiled = folder / f"{name}.mlmodelc"
    return compiled.is_dir() and any(compiled.iterdir())


def numbered_keys(function: MilFunction) -> int:
    """The number of keys that a package which prefills gives by number."""
    return sum(re.fullmatch(r"K\d+", name) is not None for name in function.outputs)


def caches(function: MilFunction) -> dict[str, int]:
    """The number of layers of each kind that have caches in a function."""
    return {
        kind: int(shape[0])
        for kind in (SLIDING, FULL)
        if f"K_{kind}_in" in function.inputs
        and (shape := function.inputs[f"K_{kind}_in"].shape)
        and isinstance(shape[0], int)
    }
