"""Fuzzers of bundles and of what lies in them."""

import hashlib
import io
import json
import shutil
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from tests.fuzz.fuzzer import Document, Files, Fuzzer, contents, dumped
from tests.fuzz.specifications import damaged_specification
from tests.fuzz.values import damaged, torn

from cetane.bundle import Bundle
from cetane.npy import open_array
from cetane.schema.manifest import MANIFEST, Manifest
from cetane.validation import parse_json, validated

RECIPE = {
    "name": "fuzz", "layout": {"kind": "single"}, "cache": {"context": 32},
    "tokens": {"verify": 3, "prefill": 0},
}  # fmt: skip


def small_bundle(folder: Path) -> Path:
    """A bundle of a tiny random model, whole, in one shard."""
    from tests.conftest import build_model, build_tokenizer
    from tests.fuzz.checkpoints import SMALL

    from cetane.checkpoint import open_checkpoint
    from cetane.pipeline.build import build
    from cetane.schema.recipe import parse_recipe

    model = folder / "model"
    build_model("llama", **(SMALL | {"vocab_size": 288})).save_pretrained(model)
    build_tokenizer().save_pretrained(model)
    recipe = parse_recipe(RECIPE, "fuzz")
    return build(open_checkpoint(model), recipe, folder / "bundle", lambda *_: None).path


class WholeBundle(Fuzzer):
    """A bundle of a stranger who lies well: whatever is damaged, its hash in the manifest fits."""

    @cached_property
    def good(self) -> Files:
        return contents(small_bundle(self.folder.parent / "made"))

    @property
    def seeds(self) -> list[Files]:
        return [self.good]

    def mutate(self, random: Random) -> Files:
        files = dict(self.good)
        manifest = json.loads(files[MANIFEST])
        name = random.choice([MANIFEST, MANIFEST, *files])
        if name == MANIFEST:
            part = random.choice((manifest, manifest["plan"], manifest["plan"]["shards"]))
            changed = damaged(random, part, times=3)
            if isinstance(part, dict) and isinstance(changed, dict):
                part.clear()
                part.update(changed)
            elif isinstance(part, list) and isinstance(changed, list):
                part[:] = changed
        elif name.endswith(".mlmodel"):
            files[name] = damaged_specification(files[name], random)
        elif name.endswith(".json"):
            files[name] = dumped(damaged(random, json.loads(files[name])))
        else:
            files[name] = torn(random, files[name])
        if name != MANIFEST and random.random() < 0.9:
            record = {"bytes": len(files[name]),
                      "sha256": hashlib.sha256(files[name]).hexdigest()}  # fmt: skip
            manifest["files"][name] = record
        return files | {MANIFEST: dumped(manifest)}

    def check(self, files: Files) -> None:
        from cetane.engine.engine import Engine
        from cetane.engine.portable import PortableBackend
        from cetane.gates.residency.audit import audit
        from cetane.gates.residency.store import InBundle
        from cetane.gates.residency.target import Target
        from cetane.mil import load

        shutil.rmtree(self.folder, ignore_errors=True)
        self.write(files)
        bundle = Bundle(self.folder)
        bundle.verify()
        bundle.gates()
        bundle.tokenizer.encode("a b")
        artifact = InBundle(bundle)
        audit({name: load(path) for name, path in artifact.packages.items()}, Target())
        engine = Engine(bundle.plan, PortableBackend(bundle), bundle.tables())
        engine.session().feed([1, 2, 3, 4, 5], "last")


class ManifestFile(Fuzzer):
    """The manifest alone: thousands of plans, where a whole bundle takes its time."""

    @cached_property
    def seed(self) -> dict[str, Any]:
        from tests.conftest import InMemoryCheckpoint, build_model
        from tests.fuzz.checkpoints import SMALL

        from cetane.planner import Planner
        from cetane.schema.recipe import parse_recipe

        recipe = parse_recipe({"name": "fuzz", "tokens": {"verify": 4, "prefill": 0}}, "fuzz")
        checkpoint = InMemoryCheckpoint(build_model(**SMALL))
        plan = Planner(checkpoint, recipe).plan()  # type: ignore[arg-type]
        manifest = Manifest(producer={}, source="x", fingerprint="y", plan=plan, files={})
        content: dict[str, Any] = manifest.model_dump(mode="json")
        return content

    @property
    def seeds(self) -> list[Files]:
        return [{MANIFEST: dumped(self.seed)}]

    def mutate(self, random: Random) -> Files:
        return {MANIFEST: dumped(damaged(random, self.seed, times=3))}

    def check(self, files: Files) -> None:
        content = parse_json(files[MANIFEST], MANIFEST)
        manifest = validated(Manifest, content, MANIFEST)
        assert manifest.plan.rows > 0


class Array(Fuzzer):
    @cached_property
    def seed(self) -> bytes:
        file = io.BytesIO()
        np.save(file, np.ones((4, 8), np.float16))
        return file.getvalue()

    @property
    def seeds(self) -> list[Files]:
        return [{"a.npy": self.seed}]

    def mutate(self, random: Random) -> Files:
        if random.random() < 0.5:
            return {"a.npy": torn(random, self.seed)}
        return {"a.npy": odd_array(random)}

    def check(self, files: Files) -> None:
        self.write(files)
        table = open_array(self.folder / "a.npy", "<f2", (4, None))
        float(table.sum())


def odd_array(random: Random) -> bytes:
    """An array whose header says anything."""
    kind = random.choice(("<f2", "|O", ">f2", "<f8", "<f2' + 'x", "|V4"))
    shape = random.choice(("(4, 8)", "(8,)", "(-1, 8)", f"({10**18}, 8)", "()", "(4, 8, 1)", "4"))
    fortran = random.random() < 0.2
    text = f"{{'descr': '{kind}', 'fortran_order': {fortran}, 'shape': {shape}, }}\n"
    length = random.choice((len(text), len(text) + 1, 0, 65535))
    head = b"\x93NUMPY" + random.choice((b"\x01\x00", b"\x02\x00", b"\x09\x09"))
    return head + length.to_bytes(2, "little") + text.encode() + bytes(64)


class Inputs(Fuzzer):
    """What `cetane diff --inputs` reads: an .npz of a function's inputs."""

    @cached_property
    def function(self) -> Any:
        from cetane.mil.program import Body, MilFunction, SizeRange, TensorType

        types = {"x": TensorType((4, 8), "fp16"), "n": TensorType((SizeRange(1),), "int32")}
        return MilFunction("main", types, {}, {}, Body((), (), ()))

    @property
    def seeds(self) -> list[Files]:
        return [{"a.npz": self.archive({"x": np.ones((4, 8), "f2"), "n": np.ones(3, "i4")})}]

    def archive(self, arrays: dict[str, Any], others: Files | None = None) -> bytes:
        file = io.BytesIO()
        np.savez_compressed(file, **arrays)
        if others:
            import zipfile

            with zipfile.ZipFile(file, "a", zipfile.ZIP_DEFLATED) as archive:
                for name, data in others.items():
                    archive.writestr(name, data)
        return file.getvalue()

    def mutate(self, random: Random) -> Files:
        arrays = {"x": np.ones((4, 8), "f2"), "n": np.ones(random.choice((1, 3, 2**20)), "i4")}
        if random.random() < 0.5:
            return {"a.npz": torn(random, self.archive(arrays))}
        name = random.choice(list(arrays))
        del arrays[name]
        return {"a.npz": self.archive(arrays, {f"{name}.npy": odd_array(random)})}

    def check(self, files: Files) -> None:
        from cetane.mil.inputs import read_inputs

        self.write(files)
        read_inputs(self.folder / "a.npz", self.function)


def draft_head_manifest() -> Document:
    """`heads/KIND/head.json`, planned for a tiny model."""
    from tests.conftest import InMemoryCheckpoint, build_model
    from tests.fuzz.checkpoints import SMALL

    from cetane.files import FileRecord
    from cetane.planner import Planner
    from cetane.schema.draft_head import ROTARY, DraftHeadManifest, Training
    from cetane.schema.recipe import parse_recipe
    from cetane.speculate.draft_heads.modules import DraftHeadConfig
    from cetane.speculate.draft_heads.planner import DraftHeadPlanner

    plan = Planner(
        InMemoryCheckpoint(build_model(**SMALL)),  # type: ignore[arg-type]
        parse_recipe({"name": "fuzz", "tokens": {"verify": 4, "prefill": 0}}, "fuzz"),
    ).plan()
    made = []
    for kind in ("medusa", "eagle3"):
        config = DraftHeadConfig(kind=kind, hidden=32, rows=8, steps=3, eps=1e-5, bundle="b")
        planner = DraftHeadPlanner(config, plan)
        training = Training(data={}, windows=2, length=16, held_out=1, positions=3,
                            top1=(0.5,) * 3, accepted=(0.5,) * 3)  # fmt: skip
        manifest = DraftHeadManifest(
            producer={}, kind=kind, bundle="b", rows=8, steps=3, taps=("layers",),
            caches=planner.caches, weight_bytes=1, functions=planner.functions, training=training,
            files={ROTARY: FileRecord(bytes=1, sha256="")} if planner.caches else {},
        )  # fmt: skip
        made.append(manifest.model_dump(mode="json"))

    def read(path: Path) -> object:
        return validated(DraftHeadManifest, parse_json(path.read_bytes(), "head.json"), "head.json")

    return Document("head.json", made, read)


class DraftHeadWeights(Fuzzer):
    """`heads/KIND/source.safetensors`: what was trained."""

    @cached_property
    def good(self) -> bytes:
        import torch

        from cetane.speculate.draft_heads.modules import DraftHeadConfig, make_draft_head

        config = DraftHeadConfig(kind="medusa", hidden=4, rows=8, steps=2, eps=1e-5, bundle="b")
        path = self.folder / "good.safetensors"
        head = make_draft_head(config)
        head.vocabulary = torch.arange(8)
        head.save(path)
        return path.read_bytes()

    @property
    def seeds(self) -> list[Files]:
        return [{"source.safetensors": self.good}]

    def mutate(self, random: Random) -> Files:
        if random.random() < 0.4:
            return {"source.safetensors": torn(random, self.good)}
        length = int.from_bytes(self.good[:8], "little")
        header = json.loads(self.good[8 : 8 + length])
        if random.random() < 0.5:
            about = json.loads(header["__metadata__"]["cetane"])
            header["__metadata__"]["cetane"] = dumped(damaged(random, about)).decode(
                "utf-8", "replace"
            )
            changed = json.dumps(header).encode()
        else:
            changed = dumped(damaged(random, header))
        return {
            "source.safetensors": len(changed).to_bytes(8, "little")
            + changed
            + self.good[8 + length :]
        }

    def check(self, files: Files) -> None:
        from cetane.speculate.draft_heads.modules import load_draft_head

        self.write(files)
        load_draft_head(self.folder / "source.safetensors")


GATES: dict[str, Any] = {
    "golden": {
        "passed": True, "fingerprint": "f", "shards": [], "warnings": ["near"], "greedy": [1.0],
        "checks": [{"name": "a", "value": 0.5, "limit": 0.1, "passed": True}], "logits": [],
        "ranges": [{"block": "layers.0", "largest": 3.5}], "probes": {"text": [1, 2]},
        "greedy_tokens": 4,
    },
    "ladder": {"passed": True, "checks": [], "shards": []},
    "perplexity": {
        "passed": True, "fingerprint": "f", "tokens": 9, "perplexity": 2.0, "text": "book",
        "reference_perplexity": 2.0, "ratio": 1.0, "limit": 1.1, "kl": 0.1, "top1": 1.0,
        "covered": 1.0, "covered_perplexity": 2.0, "covered_reference_perplexity": 2.0,
        "missing": 0.0, "absent": 0.0,
    },
    "other": {"passed": False},
}  # fmt: skip


def gates() -> Document:
    """`gates/*.json`, here in one file, as a report and `cetane info` read them."""
    from types import SimpleNamespace

    from cetane.cli.info import outcome
    from cetane.files import read_json
    from cetane.report.collect import ranges
    from cetane.report.gate_results import GateResults
    from cetane.report.verdicts import verdict

    def read(path: Path) -> None:
        content = read_json(path, follow=False)
        results = {name: value for name, value in content.items() if isinstance(value, dict)}
        manifest = SimpleNamespace(source="model")
        bundle: Any = SimpleNamespace(
            gates=lambda: results, file=lambda name: path, path=path, manifest=manifest
        )
        known = GateResults(bundle)
        for name in results:
            outcome(results[name])
            if name != "residency":
                verdict(known, name, None, None)  # type: ignore[arg-type]
        if known.golden is not None and known.golden.ranges:
            ranges(known.golden)

    return Document("gates.json", [GATES], read)
