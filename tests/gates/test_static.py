"""A folder put together from two builds: what is wrong with it is said, without running it."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import VARIANTS, build_tokenizer
from tests.families.gemma_models import FULL, SLIDING, build_gemma4, recipe

from cetane.bundle import Bundle
from cetane.checkpoint import open_checkpoint
from cetane.files import records
from cetane.gates.static import static_checks
from cetane.mil.proto import model_message
from cetane.pipeline.build import build, build_only

Change = Callable[[Any], None]
BASE: dict[str, Any] = {
    "contract": "blend",
    "sliding": "shift",
    "layout": {"kind": "chunks", "cuts": [2], "head": "last"},
    "tokens": {"verify": 0, "prefill": 0},
}
FIRST, LAST = "chunk-00", "chunk-01"


class Builds:
    """Bundles of a small Gemma 4 whose last layers read the caches of the first."""

    def __init__(self, root: Path) -> None:
        self.root = root
        model = build_gemma4(num_hidden_layers=4, layer_types=[SLIDING, FULL] * 2)
        model.save_pretrained(root / "checkpoint")
        build_tokenizer().save_pretrained(root / "checkpoint")
        self.checkpoint = open_checkpoint(root / "checkpoint")
        self.whole = root / "whole"
        build(self.checkpoint, recipe(**BASE), self.whole, lambda *_: None)
        self.packages: dict[str, Path] = {}

    def package(self, shard: str, **options: Any) -> Path:
        """One package by another recipe."""
        wanted = recipe(**BASE | options)
        key = f"{shard} {wanted.model_dump_json()}"
        if key not in self.packages:
            target = self.root / f"other-{len(self.packages)}"
            made = build_only(self.checkpoint, wanted, target, [shard], lambda *_: None)
            self.packages[key] = made[shard]
        return self.packages[key]


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Builds:
    return Builds(tmp_path_factory.mktemp("static"))


@pytest.fixture
def folder(builds: Builds, tmp_path: Path) -> Path:
    """A bundle to damage."""
    target = tmp_path / "bundle"
    shutil.copytree(builds.whole, target)
    return target


def exchange(folder: Path, shard: str, package: Path) -> None:
    shutil.rmtree(folder / f"shards/{shard}.mlpackage")
    shutil.copytree(package, folder / f"shards/{shard}.mlpackage")


def opened(folder: Path, change: Change = lambda _: None) -> Bundle:
    """The bundle, with a manifest of what is in it now; `change` changes the plan."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"] = {
        path: record.model_dump()
        for path, record in records(folder, folder).items()
        if path != "manifest.json"
    }
    change(manifest["plan"])
    (folder / "manifest.json").write_text(json.dumps(manifest))
    bundle = Bundle(folder)
    bundle.verify()
    return bundle


def found(bundle: Bundle) -> list[str]:
    return [str(finding) for finding in static_checks(bundle)]


def test_what_was_built_as_a_whole(builds: Builds) -> None:
    assert found(Bundle(builds.whole)) == []


@pytest.mark.parametrize("name", ["stateful", "readonly-range"])
def test_states_and_flexible_shapes(name: str, tiny_bundle: Callable[..., Bundle]) -> None:
    contract, _, shapes = name.partition("-")
    bundle = tiny_bundle(contract=contract, shapes=shapes or "static", **VARIANTS[name])
    assert found(bundle) == []


def test_a_last_chunk_of_another_context(builds: Builds, folder: Path) -> None:
    """The "8K chunk4 rebuild" of a published port. Its hashes are right."""
    exchange(folder, LAST, builds.package(LAST, context=128))
    problems = found(opened(folder))
    assert (
        "chunk-01/decode: mask_full is fp16 (1, 1, 1, 128), not fp16 (1, 1, 1, 64): made for "
        "another context or window than 64 tokens and 64 slots of full"
    ) in problems
    assert all(problem.startswith(LAST) for problem in problems)


@pytest.mark.parametrize(
    ("shard", "options", "problem"),
    [
        (FIRST, {"context": 128}, r"full_k is fp16 .*128\), not fp16 .*: made for another context"),
        (FIRST, {"context": 128}, r"shared_full_k_out is fp16 \(1, 1, 32, 128\)"),
        (FIRST, {"contract": "stateful"}, "no input full_write, which the manifest has"),
        (FIRST, {"contract": "stateful"}, "the state full_kv is not in the manifest"),
        (LAST, {"tokens": {"verify": 0, "prefill": 8}}, "the function prefill is not in the"),
    ],
)
def test_a_package_of_another_recipe(
    builds: Builds, folder: Path, shard: str, options: dict[str, Any], problem: str
) -> None:
    exchange(folder, shard, builds.package(shard, **options))
    problems = found(opened(folder))
    assert any(re.search(problem, p) for p in problems), problems
    assert all(p.startswith(shard) for p in problems)


def shard(plan: Any, index: int) -> Any:
    (function,) = plan["shards"][index]["functions"]
    return function


def port(plan: Any, index: int, kind: str, name: str) -> Any:
    (found,) = (p for p in shard(plan, index)[kind] if p["name"] == name)
    return found


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda plan: port(plan, 1, "inputs", "shared_full_k").update(shape=[1, 1, 32, 32]),
            r"shared_full_k is \(1, 1, 32, 32\), but chunk-00 writes \(1, 1, 32, 64\) \(decode\)",
        ),
        (
            lambda plan: port(plan, 1, "inputs", "hidden").update(dtype="int32"),
            "hidden is fp16 .*, not int32",
        ),
        (
            lambda plan: port(plan, 1, "inputs", "cos_full").update(shape=[1, 1, 16, 1]),
            "rotary-full.npy: 32 channels, but cos_full takes 16",
        ),
        (
            lambda plan: port(plan, 0, "inputs", "per_layer_tokens").update(shape=[1, 8, 1, 1]),
            "table per_layer: 32 channels, but per_layer_tokens takes 8",
        ),
        (
            lambda plan: shard(plan, 0).update(
                outputs=[o for o in shard(plan, 0)["outputs"] if o["name"] != "full_k_out"]
            ),
            "chunk-00/decode: the output full_k_out is not in the manifest",
        ),
    ],
)
def test_a_manifest_of_something_else(folder: Path, change: Change, problem: str) -> None:
    problems = found(opened(folder, change))
    assert any(re.search(problem, p) for p in problems), problems


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda told: told.input.pop(0), "no described input "),
        (lambda told: setattr(told.output[0], "name", "z"), "the described output z is not in"),
        (
            lambda told: setattr(told.output[0].type.multiArrayType, "dataType", 65568),
            r"is described as fp32 \(.*, not fp16 \(",
        ),
        (
            lambda told: told.input[0].type.multiArrayType.ClearField("shape"),
            r"is described as fp16 \(\), not fp16 \(1, ",
        ),
        (
            lambda told: told.input[0].type.multiArrayType.shape.append(2),
            r"is described as fp16 \(1, .*, 2\), not fp16 \(1, ",
        ),
    ],
)
def test_a_description_of_something_else(folder: Path, change: Change, problem: str) -> None:
    """Core ML calls a function by its description, and compares it with the function."""
    file = next(folder.glob(f"shards/{LAST}.mlpackage/Data/*/model.mlmodel"))
    spec = model_message()()
    spec.ParseFromString(file.read_bytes())
    change(next(iter(spec.description.functions), spec.description))
    file.write_bytes(spec.SerializeToString())
    problems = found(opened(folder))
    assert any(re.search(problem, p) for p in problems), problems
    assert all(p.startswith(LAST) for p in problems)


@pytest.mark.parametrize("newer", ["version", "opset"])
def test_a_package_for_another_system(folder: Path, newer: str) -> None:
    file = next(folder.glob(f"shards/{LAST}.mlpackage/Data/*/model.mlmodel"))
    spec = model_message()()
    spec.ParseFromString(file.read_bytes())
    spec.specificationVersion = 10
    for function in spec.mlProgram.functions.values() if newer == "opset" else ():
        body = function.block_specializations.pop("CoreML8")
        function.block_specializations["CoreML9"].CopyFrom(body)
        function.opset = "CoreML9"
    file.write_bytes(spec.SerializeToString())
    opset = "CoreML9" if newer == "opset" else "CoreML8"
    assert found(opened(folder)) == [
        f"{LAST}: made for version 10 and {opset}, not version 9 and CoreML8, as for iOS18"
    ]


def test_a_default_function_that_is_missing(folder: Path) -> None:
    file = next(folder.glob(f"shards/{LAST}.mlpackage/Data/*/model.mlmodel"))
    spec = model_message()()
    spec.ParseFromString(file.read_bytes())
    spec.description.defaultFunctionName = "nowhere"
    file.write_bytes(spec.SerializeToString())
    (finding,) = found(opened(folder))
    assert "has no function 'nowhere', which is its default" in finding


def test_a_rotary_table_that_is_too_short(folder: Path) -> None:
    table = np.load(folder / "rotary-full.npy")
    np.save(folder / "rotary-full.npy", table[:, :32])
    (problem,) = found(opened(folder))
    assert re.search(r"rotary-full.npy: float32 of shape \(2, 32, 32\)", problem)


def test_a_package_that_is_none(folder: Path) -> None:
    next(folder.glob(f"shards/{LAST}.mlpackage/Data/*/model.mlmodel")).write_bytes(b"\xff" * 20)
    (problem,) = found(opened(folder))
    assert problem.startswith(f"{LAST}: ")
    assert "cannot be parsed" in problem
