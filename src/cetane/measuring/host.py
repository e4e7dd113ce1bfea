"""A host for any bundle, in numpy: it fills the inputs of every call and keeps its outputs.

`host.json` describes the bundle: its functions, with the source of each input and the sink of
each output, its modes and its cache groups. cetane's docs/architecture.md explains the words.
The host runs calls that the caller chose: `Host.call(mode, tokens)`.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from . import Json

Array = npt.NDArray[Any]
EMPTY, MASKED = -1, -4e4
"""The position in a slot without a token, and the value of a mask for a key that is not seen."""

KEPT: dict[str, type[np.generic]] = {
    "cache": np.float16,
    "history": np.float16,
    "matrix": np.float32,
}
"""The types of the buffers that the host keeps between calls, by source. Caches may be int8."""


class LoadedModel(Protocol):
    """A loaded function, as coremltools' `CompiledMLModel`."""

    def predict(self, data: dict[str, Array], state: Any = None) -> dict[str, Array]: ...
    def make_state(self) -> Any: ...


class Host:
    """One bundle with its tables, and one sequence. `reset` begins a new sequence."""

    def __init__(self, folder: Path, load: Callable[[str, str], LoadedModel]) -> None:
        """`folder` holds `host.json` and the tables. `load(shard, function)` gives a model."""
        self.plan: Json = json.loads((folder / "host.json").read_text(encoding="utf-8"))
        self.functions = {(f["shard"], f["name"]): f for f in self.plan["functions"]}
        self.arrays = {
            path.stem: np.load(path, mmap_mode="r", allow_pickle=False)
            for path in folder.glob("*.npy")
        }
        self.load, self.models = load, dict[tuple[str, str], LoadedModel]()
        self.along = 3 if self.plan["order"] == "c1t" else 2
        self.seconds: dict[str, float] = defaultdict(float)
        """Seconds spent in each shard's predictions."""
        self.reset()

    def reset(self) -> None:
        """Forget the sequence: empty caches, histories, matrices and states, position 0."""
        self.rewind()
        self.states: dict[str, Any] = {}
        self.kept = {
            item["source"]["name"]: np.zeros(item["shape"], kept_type(item))
            for function in self.functions.values()
            for item in function["inputs"]
            if item["source"]["host"] in KEPT
        }

    def rewind(self) -> None:
        """Go to position 0 in the memory that is there. Histories, matrices and states keep what
        they hold, so times are right and logits may be wrong."""
        self.position = 0
        self.slots = {name: np.full(g["count"], EMPTY) for name, g in self.plan["caches"].items()}

    def call(
        self, mode: str, tokens: list[int], logits: bool = True, adapter: str | None = None
    ) -> Array | None:
        """Run one call of a mode, with an adapter or without. Returns logits fp32
        `(len(tokens), V)`; None if it is silent.

        A call takes at most the mode's tokens; the rest of its columns is padding.
        """
        modes = self.plan["modes"] if adapter is None else self.plan["adapters"][adapter]
        described = modes[mode]
        now = HostCall(self, tokens, described["tokens"], logits)
        for step in described["steps" if logits else "silent"]:
            outputs = now.route(step) if "experts" in step else now.run(step)
            name = step["experts"][0][0] if "experts" in step else step["function"]
            for item in self.functions[step["shard"], name]["outputs"]:
                now.keep(item["sink"], outputs[item["name"]])
        self.slots = {name: after for name, (after, _, _) in now.groups.items()}
        self.position += len(tokens)
        return now.logits

    def predict(self, shard: str, name: str, inputs: dict[str, Array]) -> dict[str, Array]:
        """Call a function, with the states of its owner."""
        function = self.functions[shard, name]
        model = self.models.get((shard, name))
        if model is None:
            model = self.models[shard, name] = self.load(shard, name)
        state = None
        if function["states"]:
            owner = function["owner"]
            if owner not in self.states:
                self.states[owner] = model.make_state()
            state = self.states[owner]
        started = time.perf_counter()
        outputs = model.predict(inputs, state) if state is not None else model.predict(inputs)
        self.seconds[shard] += time.perf_counter() - started
        return outputs


class HostCall:
    """One call on its way through the shards."""

    def __init__(self, host: Host, tokens: list[int], width: int, wanted: bool) -> None:
        self.host, self.width, self.count = host, width, len(tokens)
        self.wanted = wanted  # a function of a silent call may give logits all the same
        self.tokens = np.asarray(tokens)
        self.positions = host.position + np.arange(self.count)
        self.groups = {
            name: place(group, host.slots[name], self.positions, width)
            for name, group in host.plan["caches"].items()
        }
        self.tensors: dict[str, Array] = {}
        self.logits: Array | None = None
        self.choice: Array = np.zeros(0, int)
        """The token of the slice's largest logit, for each of the call's tokens."""

    def run(self, step: Json) -> dict[str, Array]:
        function = self.host.functions[step["shard"], step["function"]]
        inputs = {item["name"]: self.input(item) for item in function["inputs"]}
        return self.host.predict(step["shard"], step["function"], inputs)

    def route(self, step: Json) -> dict[str, Array]:
        """Run the experts that tokens choose, each on the columns of its tokens."""
        results = {
            item["name"]: self.before(item, bool(step.get("adds")))
            for item in self.host.functions[step["shard"], step["experts"][0][0]]["outputs"]
        }
        for expert, mine in by_expert(step, columns(self.tensors[step["scores"]])[:, : self.count]):
            functions = [self.host.functions[step["shard"], n] for n in step["experts"][expert]]
            while len(mine):
                fitting = [f for f in functions if f["tokens"] >= len(mine)]
                function = fitting[0] if fitting else functions[-1]
                taken, mine = mine[: function["tokens"]], mine[function["tokens"] :]
                inputs = {
                    item["name"]: self.hidden(
                        columns(self.input(item))[:, taken], function["tokens"]
                    )
                    for item in function["inputs"]
                }
                made = self.host.predict(step["shard"], function["name"], inputs)
                for name, value in made.items():
                    results[name][:, taken] += columns(value)[:, : len(taken)]
        return {
            name: self.hidden(value.astype(np.float16), self.width)
            for name, value in results.items()
        }

    def before(self, item: Json, adds: bool) -> Array:
        """What experts add to, fp32 `(C, width)`: the tensor that was there, or zeros."""
        if adds:
            return columns(self.tensors[item["sink"]["name"]]).astype(np.float32)
        return np.zeros((item["shape"][1], self.width), np.float32)

    def input(self, item: Json) -> Array:
        """The array for an input, from its source."""
        source, host = item["source"], self.host
        kind = source["host"]
        if kind == "tensor":
            return self.tensors[source["name"]]
        if kind in KEPT:
            given = np.int8 if item["dtype"] == "int8" else np.float16
            return host.kept[source["name"]].astype(given, copy=False)
        if kind == "position":
            return self.groups[source["group"]][2][:1].astype(np.int32)
        if kind == "token_ids":
            return padded(self.tokens[None], self.width).astype(np.int32)
        if kind == "mask":
            return self.mask(source)
        if kind == "write_mask":
            after, _, targets = self.groups[source["group"]]
            write = np.zeros((self.width, len(after)), np.float16)
            write[np.arange(self.count), targets] = 1
            return write[None, None]
        if kind == "rotary":
            table = host.arrays[f"rotary-{source['table']}"][0 if source["part"] == "cos" else 1]
            return padded(table[self.positions].T, self.width).astype(np.float16)[None, None]
        return self.hidden(self.embedding(source["table"]), self.width)

    def embedding(self, table: str) -> Array:
        """Rows of a table, fp16 `(C, n)`. An int8 row has one scale. A uint8 row holds two 4-bit
        integers a byte, with a scale for every 32 columns."""
        name = "embedding" if table == "tokens" else f"embedding-{table}"
        rows = self.host.arrays[name][self.tokens]
        if f"{name}-scales" in self.host.arrays:
            scales = self.host.arrays[f"{name}-scales"][self.tokens].astype(np.float32)
            if rows.dtype == np.uint8:
                bits = np.stack([rows & 15, rows >> 4], -1).reshape(self.count, -1)
                integers = (bits.astype(np.int8) ^ 8) - 8  # in two's complement
                rows = integers * np.repeat(scales, 32, axis=-1)[:, : integers.shape[1]]
            else:
                rows = rows * (scales[:, None] / 127)
        return rows.T.astype(np.float16)

    def mask(self, source: Json) -> Array:
        """The mask `(1, 1, width, keys)`: 0, or minus the distance, where a token sees a key."""
        keys = self.groups[source["group"]][1]
        queries = np.full((self.width, 1), EMPTY)
        queries[: self.count, 0] = self.positions
        seen = (keys != EMPTY) & (queries >= keys)
        if source["window"] is not None:
            seen &= (queries - keys < source["window"]) | (keys < source["sinks"])
        shown = keys - queries if source["distances"] else 0
        return np.where(seen, shown, MASKED).astype(np.float16)[None, None]

    def keep(self, sink: Json, value: Array) -> None:
        """Store an output in its sink, without padding."""
        kind = sink["host"]
        if kind == "tensor":
            self.tensors[sink["name"]] = value
        elif kind == "history":
            past = self.host.kept[sink["name"]]
            new = np.take(value, range(self.count), self.host.along)
            joined = np.concatenate([past, new], self.host.along)
            last = range(-past.shape[self.host.along], 0)
            self.host.kept[sink["name"]] = np.take(joined, last, self.host.along)
        elif kind == "cache":
            self.write(sink, value)
        elif kind == "matrix":
            new = value.reshape(*value.shape[:2], -1)[..., : self.count]
            self.host.kept[sink["name"]] = folded(self.host.kept[sink["name"]], new, sink["groups"])
        elif self.wanted:
            self.add_logits(sink, value)

    def write(self, sink: Json, value: Array) -> None:
        before, targets = self.host.kept[sink["name"]], self.groups[sink["group"]][2]
        shifts = self.host.plan["caches"][sink["group"]]["contract"] == "shift"
        if shifts and sink["write"] == "append":
            joined = np.concatenate([before, value[..., : self.count]], -1)
            self.host.kept[sink["name"]] = joined[..., self.count :]
        elif sink["write"] == "append":
            before[..., targets] = value[..., : self.count]
        else:
            self.host.kept[sink["name"]] = value

    def add_logits(self, sink: Json, value: Array) -> None:
        """Collect logits from a slice of the head, or the choice that the slice made."""
        plan, rows = self.host.plan, self.host.arrays["head-tokens"]
        if self.logits is None:
            self.logits = np.full((self.count, plan["vocab"]), -np.inf, np.float32)
            self.logits[:, rows] = MASKED
        if sink["host"] == "logits":
            part = value.reshape(value.shape[1], -1)[:, : self.count].T
            self.logits[:, rows[sink["start"] : sink["stop"]]] = self.capped(part)
        elif sink["part"] == "row":
            blocks, *places = value[:, : self.count].astype(int)
            self.choice = rows[sink["start"] + sink["block"] * blocks + sum(places)]
        else:
            best = self.capped(value.reshape(-1)[: self.count])
            self.logits[np.arange(self.count), self.choice] = best

    def capped(self, logits: Array) -> Array:
        plain, cap = logits.astype(np.float32), self.host.plan["softcap"]
        capped: Array = plain if cap is None else cap * np.tanh(plain / cap)
        return capped

    def hidden(self, values: Array, width: int) -> Array:
        """The hidden tensor of `(C, n)`, with zeros for padding."""
        wide = padded(values, width)
        return wide[None, :, None] if self.host.along == 3 else wide[None, :, :, None]


def kept_type(item: Json) -> type[np.generic]:
    """The type in which the host keeps what an input reads."""
    return np.int8 if item["dtype"] == "int8" else KEPT[item["source"]["host"]]


def by_expert(step: Json, scores: Array) -> Iterator[tuple[int, Array]]:
    """The places in `step["experts"]` that tokens choose by their scores `(experts, n)`, each with
    the columns of these tokens."""
    if step.get("adds"):
        together = step.get("together", 1)
        for number in range(len(step["experts"])):
            own = scores[number * together : (number + 1) * together]
            yield number, np.flatnonzero(own.any(axis=0))
    else:
        choices = scores.argmax(axis=0)
        for number in np.unique(choices):
            yield number, np.flatnonzero(choices == number)


def folded(matrices: Array, new: Array, groups: int) -> Array:
    """Matrices `(L, heads, keys, values)` after the tokens of some columns `(L, C, n)`.

    A column holds the keys of all heads, their values, and `groups` logarithms of decays for each.
    """
    layers, heads, size, width = matrices.shape
    for column in np.moveaxis(new, -1, 0).astype(np.float32):
        parts = np.split(column, [heads * size, heads * (size + width)], axis=1)
        key, value, decay = (part.reshape(layers, heads, 1, -1) for part in parts)
        kept = np.exp(decay).repeat(width // groups, axis=3)
        matrices = kept * matrices + key.swapaxes(2, 3) * value
    return matrices


def columns(value: Array) -> Array:
    """A hidden tensor as `(C, T)`."""
    return value.reshape(value.shape[1], -1)


def padded(values: Array, width: int) -> Array:
    """`(C, n)` with zero columns up to `width`."""
    return np.pad(values, ((0, 0), (0, width - values.shape[1])))


def place(group: Json, held: Array, positions: Array, width: int) -> tuple[Array, Array, Array]:
    """The slots after a call, the keys that it sees, and the slot of each of its tokens.

    A slot is shown as the position of its token, or EMPTY.
    """
    count, contract, sinks = len(positions), group["contract"], group["sinks"]
    again = group["limited"] and width > 1 and contract in ("shift", "blend")
    reads = contract == "readonly" or again
    padding = np.concatenate([positions, np.full(width - count, EMPTY)])
    free = max(group["count"] - sinks, 1)
    targets = np.where(positions < sinks, positions, sinks + (positions - sinks) % free)
    if contract.endswith("shift"):
        after = np.concatenate([held, positions if reads else padding])
        after = after[count if reads else width :]
    else:
        after = held.copy()
        if contract == "stateful":  # the graph wrote the padding too
            after[targets[0] : targets[0] + width] = EMPTY
        after[targets] = positions
    keys = np.concatenate([held, padding]) if reads else after
    return after, keys, targets
