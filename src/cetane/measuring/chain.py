"""A child's job: a whole bundle, whose functions the host calls one after another.

It stays open and obeys orders, so that two bundles can be measured in turns.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from . import Json
from .children import tell
from .host import Array, Host
from .loading import compile_package, load
from .machine import peak_bytes
from .times import clocked, spread

TOP = 5
"""The number of best tokens whose logits are kept for every position."""


class ChainedRun:
    """An open bundle."""

    def __init__(self, job: Json) -> None:
        self.job, self.folder = job, Path(job["folder"])
        self.load_ms: dict[str, float] = {}
        self.host = Host(self.folder, self.open)
        self.probes: list[Json] = json.loads((self.folder / "probes.json").read_text())

    def open(self, shard: str, function: str) -> Any:
        """Load a function, and note the time."""
        names = [name for owner, name in self.host.functions if owner == shard]
        compiled = Path(self.job["compiled"]) / f"{shard}.mlmodelc"
        if not compiled.is_dir():
            compile_package(self.folder / "shards" / f"{shard}.mlpackage", compiled)
        opened: list[Any] = []
        job = {
            "compiled": str(compiled),
            "function": function,
            "several": len(names) > 1,
            "units": self.job["units"],
        }
        self.load_ms[f"{shard}/{function}"] = clocked(lambda: opened.append(load(job)))
        return opened[0]

    def probe(self, index: int) -> Json:
        """Run a probe's calls, and compare the logits of every position that it judges."""
        probe = self.probes[index]
        self.host.reset()
        rows: list[Array] = []
        for call in probe["calls"]:
            logits = self.host.call(call["mode"], call["tokens"], call["logits"], probe["adapter"])
            if logits is not None:
                rows.extend(logits if probe["every"] else logits[-1:])
        expected = np.load(self.folder / probe["expected"], mmap_mode="r", allow_pickle=False)
        return {
            "probe": probe["name"],
            "positions": [
                position(row, np.asarray(want, np.float32))
                for row, want in zip(rows, expected, strict=True)
            ],
        }

    def turn(self, steps: int) -> Json:
        """Read the prompt of the first probe, then decode greedily. Times are in milliseconds."""
        self.host.reset()
        self.host.seconds.clear()
        started = time.perf_counter()
        logits = self.read_prompt()
        first = 1e3 * (time.perf_counter() - started)
        count = self.host.position
        tokens, times = [int(logits.argmax())], []
        self.host.seconds.clear()
        for _ in range(min(steps, self.host.plan["context"] - count)):
            begun = time.perf_counter()
            logits = self.step(tokens[-1])
            times.append(round(1e3 * (time.perf_counter() - begun), 4))
            tokens.append(int(logits.argmax()))
        shards = {name: 1e3 * s / max(len(times), 1) for name, s in self.host.seconds.items()}
        return {
            "prompt_tokens": count,
            "first_token_ms": round(first, 4),
            "prefill_tok_s": round(1e3 * count / first, 4),
            "decode": spread(times),
            "decode_tok_s": round(1e3 * len(times) / sum(times), 4),
            "shard_ms": {name: round(ms, 4) for name, ms in shards.items()},
            "tokens": tokens,
            **self.verifying(),
        }

    def read_prompt(self) -> Array:
        """Feed the first probe's prompt. Returns the logits `(V,)` after it."""
        for call in self.probes[0]["prompt"]:
            logits = self.host.call(call["mode"], call["tokens"], call["logits"])
        assert logits is not None
        last: Array = logits[-1]
        return last

    def step(self, token: int) -> Array:
        """One decode step. Returns logits `(V,)`."""
        logits = self.host.call("decode", [token])
        assert logits is not None
        last: Array = logits[-1]
        return last

    def verifying(self) -> Json:
        """The time of a verifying call at the start of a sequence, if the bundle has one."""
        mode = self.host.plan["modes"].get("verify")
        if mode is None:
            return {}
        tokens = (self.probes[0]["prompt"][0]["tokens"] * mode["tokens"])[: mode["tokens"]]
        times = []
        self.host.reset()
        for _ in range(6):
            self.host.rewind()  # new memory costs time when it is first touched
            times.append(clocked(lambda: self.host.call("verify", tokens)))
        return {"verify_tokens": mode["tokens"], "verify": spread(times[1:])}

    def decode_for(self, seconds: float) -> Json:
        """Decode for some seconds, as one long load for a power meter. The load contains no prompt:
        at the end of the context, decoding goes on in an empty sequence."""
        self.host.reset()
        logits = self.read_prompt()
        begun, count, started = time.time(), 0, time.perf_counter()
        while time.perf_counter() - started < seconds:
            if self.host.position >= self.host.plan["context"]:
                self.host.reset()
            logits = self.step(int(logits.argmax()))
            count += 1
        return {"begun": begun, "ended": time.time(), "tokens": count}


def position(logits: Array, expected: Array) -> Json:
    """The agreement of one position's logits `(V,)` with the expected ones."""
    # A head without a token gives minus infinity for it; a head that chooses gives -4e4 (MASKED).
    known = np.isfinite(expected) & (expected > -3e4)
    finite = bool(np.isfinite(logits[known]).all())
    best = np.argsort(expected)[-2:]
    content: Json = {
        "expected": int(best[1]),
        "margin": float(expected[best[1]] - expected[best[0]]),
        "finite": finite,
    }
    if not finite:
        return content
    top = np.argsort(logits)[::-1][:TOP]
    p, q = log_softmax(expected[known]), log_softmax(logits[known])
    a, b = logits[known].astype(np.float64), expected[known].astype(np.float64)
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return content | {
        "top": [[int(token), float(logits[token])] for token in top],
        "cosine": float(a @ b) / norms if norms else 0.0,
        "kl": float((np.exp(p) * (p - q)).sum()),
        "largest_error": float(np.abs(a - b).max()),
    }


def log_softmax(logits: Array) -> Array:
    shifted = logits.astype(np.float64) - float(logits.max())
    result: Array = shifted - np.log(np.exp(shifted).sum())
    return result


def serve(job: Json) -> None:
    """Open a bundle, then obey the orders of stdin, one line of JSON each."""
    chain = ChainedRun(job)
    for line in sys.stdin:
        order: Json = json.loads(line)
        match order["do"]:
            case "open":
                answer: Json = {"open_ms": clocked(lambda: chain.turn(1)), "load_ms": chain.load_ms}
            case "probe":
                answer = chain.probe(order["index"])
            case "turn":
                answer = chain.turn(order["steps"])
            case "decode":
                answer = chain.decode_for(order["seconds"])
            case _:
                break
        tell(answer | {"peak_bytes": peak_bytes()})
