"""Fuzzers of files that a user writes, or that commands wrote for other commands."""

import datetime
import struct
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from tests.fuzz.fuzzer import Document, Files, Fuzzer
from tests.fuzz.values import torn

SHA = "ab" * 32


def recipe() -> Document:
    """A recipe, and the plan that it makes of a tiny model."""
    from tests.conftest import InMemoryCheckpoint, build_model
    from tests.fuzz.checkpoints import SMALL

    from cetane.planner import Planner
    from cetane.schema.recipe import load_recipe

    checkpoint: Any = InMemoryCheckpoint(build_model(**SMALL))
    contents = [
        {
            "name": "x", "tensor_layout": "c1t", "layout": {"kind": "single"},
            "cache": {"contract": "stateful", "context": 512, "padded": True},
            "tokens": {"verify": 4, "prefill": 64}, "embedding": {"format": "int8"},
            "head": {"slices": 2}, "target": {"deployment": "iOS18"},
            "compression": {"default": "int8-per-channel", "types": {"head": "fp16"}},
        },
        {"tensor_layout": "ct1", "layout": {"kind": "chunks", "chunks": 1}, "head": {"slices": 3}},
        {"layout": {"kind": "per-block"}, "tokens": {"verify": 3, "shapes": "range"}},
    ]  # fmt: skip

    def read(path: Path) -> None:
        Planner(checkpoint, load_recipe(str(path))).plan()

    return Document("r.toml", contents, read)


def experiment() -> Document:
    from cetane.lab.library import load_experiment

    content = {
        "title": "A test", "status": "Measured", "date": datetime.date(2026, 1, 1),
        "hypothesis": "Smaller is smaller.", "lesson": "It is.", "metrics": ["weight_bytes"],
        "workload": {"model": "zaya-tiny", "text": "text.txt", "tokens": 40, "new_tokens": 4},
        "baseline": {"recipe": "fp16"},
        "candidate": {"recipe": "fp16", "changes": {"tokens": {"verify": 8}}},
        "expects": [{"metric": "weight_bytes", "of": "ratio", "most": 0.6}],
        "gates": [{"metric": "weight_bytes", "of": "ratio", "most": 0.6}],
    }  # fmt: skip

    def read(path: Path) -> None:
        made = load_experiment(path)
        for arm in (made.arm("baseline"), made.arm("candidate")):
            arm.recipe_here()

    return Document("e.toml", [content], read)


def journal() -> Document:
    """A journal, read, repaired and appended to."""
    from cetane.lab.journal import Journal, Verdict
    from cetane.lab.library import Lab  # noqa: F401, what reads it

    intent = {
        "event": "intent", "run": "1", "experiment": "x", "at": "2026-01-01", "command": "lab",
        "experiment_sha256": SHA, "recipes": {"baseline": SHA}, "machine": {"cores": 2},
        "versions": {"cetane": "1"},
    }  # fmt: skip
    figure = {"value": 1.5, "low": None, "unit": "ms", "kind": "measured", "n": 3}
    arms = {key: {"metrics": {"decode_ms": figure}} for key in ("baseline", "candidate")}
    outcome = {
        "event": "outcome", "run": "1", "experiment": "x", "at": "2026-01-01", "status": "passed",
        "seconds": 1.5, "arms": arms,
        "gates": [{"metric": "decode_ms", "arm": "ratio", "value": 1.0, "passed": True}],
    }  # fmt: skip
    decided = {"event": "verdict", "experiment": "x", "at": "2026", "status": "Measured",
               "reason": "1.5 ms"}  # fmt: skip

    def read(path: Path) -> None:
        known = Journal(path)
        known.runs()
        known.verdicts()
        known.repair()
        known.append(Verdict(experiment="x", at="2026", status="Measured", reason="1"))
        known.runs()

    return Document("journal.jsonl", [[intent, outcome, decided], [intent]], read)


def sweep() -> Document:
    """The points of a sweep, as the next sweep and a report read them."""
    from cetane.report.user_files import read_sweep
    from cetane.sweeps.points import KeyedLedger, Point

    point = {
        "version": 1, "key": "k", "name": "fp16", "method": "fp16", "bits": 16, "group": "32",
        "compression": {"default": "fp16"}, "weight_bytes": 1000, "bits_per_weight": 16.0,
        "perplexity": 20.0, "perplexity_ratio": 1.0, "kl": 0.1, "top1": 0.9,
        "cosines": {"chunk": 0.99}, "seconds": 1.5, "producer": {},
        "smoke": [{"id": "capital", "text": "a", "same": 1, "expected": False}],
        "predicted": {"chip": "m4-max", "decode_ms": 4.25, "tok_s": 235.3, "binds": "bytes",
                      "weights_off_ane": 0.0, "rules": []},
        "model": {"source": "m", "fingerprint": "one"},
        "text": {"name": "text", "sha256": "0", "tokens": 512},
    }  # fmt: skip

    def read(path: Path) -> None:
        read_sweep(path, "one")
        KeyedLedger(path, Point).get("k")

    return Document("sweep.jsonl", [[point, point | {"key": "l", "kl": 0.5}]], read)


def measured() -> Document:
    """What a Mac measured, beside a package."""
    from cetane.gates.residency.measured import read_measured

    op = {"kind": "conv", "output": "y", "device": "ANE"}
    content = {
        "machine": "Mac16,1", "system": "26.1", "tools": "coremltools 9", "date": "2026-01-01",
        "packages": {"model": {"specification": SHA, "functions": {"main": {"ops": [op]}}}},
    }  # fmt: skip
    return Document("model.measured.json", [content], read_measured)


def subset() -> Document:
    """The tokens of a smaller head."""
    from cetane.schema.subset import load_subset

    text = {"name": "a.txt", "sha256": "0" * 64, "tokens": 98, "covered": 97}
    content = {"vocabulary": 400, "tokens": "0-258 261 300-302", "tokenizer": "a" * 64,
               "texts": [], "held_out": [text]}  # fmt: skip

    def read(path: Path) -> None:
        made = load_subset(path)
        assert len(made.ids) <= made.vocabulary
        assert 0 <= made.missing <= 1

    return Document("subset.json", [content], read)


def scores() -> Document:
    """The scores of attention heads."""
    from cetane.schema.streaming import Streaming, load_scores

    content = {
        "source": "a model", "model_type": "llama", "method": "mass",
        "settings": {"texts": 4, "tokens": 768}, "layers": [[0.1, 0.9], [], [0.9, -0.5]],
    }  # fmt: skip

    def read(path: Path) -> None:
        made = load_scores(path)
        kept = Streaming(scores=made).kept()
        count = sum(map(len, made.layers))
        assert sum(map(len, kept.values())) == round(count / 2)

    return Document("heads.json", [content], read)


def benchmark() -> Document:
    """What `cetane bench --json` printed, for a report."""
    from cetane.report.user_files import read_benchmark

    speed = {
        "category": "chat", "drafter": "ngram", "prompts": 1, "tokens": 32, "plain": 80.5,
        "speculative": 80.5, "ratio": 1.0, "slowest": 1.0, "by_calls": 1.0, "acceptance": 0.6,
        "tokens_per_call": 2.5, "verifier_calls": 4, "fallbacks": 3, "same": True,
        "first_plain": 0.4, "first_speculative": 0.5, "reading": 0.1,
    }  # fmt: skip
    content = {"bundle": "b", "draft_tokens": 3, "seconds": {"1": 0.01}, "passed": True,
               "judged_by": "calls", "speeds": [speed]}  # fmt: skip
    return Document("bench.json", [content], lambda path: read_benchmark(path, path))


class SensitivitiesFile(Fuzzer):
    """`compression.sensitivity` of a recipe, whose hash fits."""

    @cached_property
    def good(self) -> bytes:
        from safetensors.numpy import save

        return save({"model.layers.0.mlp.up_proj.weight": np.ones(8, np.float32)}, {"key": "k"})

    @property
    def seeds(self) -> list[Files]:
        return [{"sensitivity.safetensors": self.good}]

    def mutate(self, random: Random) -> Files:
        return {"sensitivity.safetensors": torn(random, self.good)}

    def check(self, files: Files) -> None:
        from cetane.compress.sensitivity import SensitivityFile, stored_key
        from cetane.files import sha256

        self.write(files)
        path = self.folder / "sensitivity.safetensors"
        stored_key(path)
        made = SensitivityFile(file=path.name, sha256=sha256(path))
        made.find_at(path)
        made.read()


class SuffixTrie(Fuzzer):
    """The texts that the suffix drafter keeps, whose hash fits."""

    @cached_property
    def good(self) -> bytes:
        from cetane.speculate.trie import Trie

        trie = Trie(most=1000)
        trie = trie.insert([1, 2, 3, 1, 2, 4])
        path = self.folder / "good.trie"
        trie.save(path, SHA)
        return path.read_bytes()

    @property
    def seeds(self) -> list[Files]:
        return [{"a.trie": self.good}]

    def mutate(self, random: Random) -> Files:
        import hashlib

        from cetane.speculate.trie import HEADER, MAGIC

        start = len(MAGIC) + HEADER.size
        header, body = self.good[:start], bytearray(self.good[start:])
        if random.random() < 0.3:
            return {"a.trie": torn(random, self.good)}
        for _ in range(random.randint(1, 3)):
            at = 4 * random.randrange(len(body) // 4)
            body[at : at + 4] = struct.pack("<i", random.choice((0, 1, -1, 7, 2**31 - 1, -(2**31))))
        nodes, clock, _, owner = HEADER.unpack(header[len(MAGIC) :])
        digest = hashlib.sha256(body).digest()
        return {"a.trie": MAGIC + HEADER.pack(nodes, clock, digest, owner) + body}

    def check(self, files: Files) -> None:
        from cetane.speculate.trie import Trie

        self.write(files)
        trie = Trie(most=1000)
        trie.load(self.folder / "a.trie", SHA)
        trie.insert([1, 2, 3]).find([1, 2])
