"""The folder for CoreML-LLM: driven as its Swift runtime does, by hand, it is the model."""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import InMemoryCheckpoint, build_tokenizer
from tests.export.app_models import (
    CONTEXT,
    DRAFTS,
    FOUR,
    KINDS,
    LENGTH,
    MERGED,
    MODEL,
    OF_E2B,
    PREFILL,
    SHARED,
    THREE,
    WINDOW,
    app_recipe,
    authored_folder,
    committed,  # noqa: F401
)
from tests.families.gemma_models import FULL, SLIDING, build_gemma3, build_gemma4, recipe
from tests.families.parity import tokens
from tests.lower.half_weights import half_logits_of

from cetane.checkpoint import open_checkpoint
from cetane.errors import CetaneError
from cetane.export.coreml_llm import check, export
from cetane.export.coreml_llm.adapter import Adapter
from cetane.export.coreml_llm.app_folder import read_folder
from cetane.export.coreml_llm.contract import CHUNKS, caches
from cetane.export.coreml_llm.folder import FILES, write_config
from cetane.export.coreml_llm.host import AppHost
from cetane.export.coreml_llm.planner import planners
from cetane.families import Head
from cetane.files import LARGEST, records, sha256
from cetane.mil import load
from cetane.mil.program import Body, MilFunction, TensorType
from cetane.pipeline.replacement import replace_package
from cetane.pipeline.runtime_folder import check_folder
from cetane.schema.manifest import Origin
from cetane.schema.recipe import load_recipe


@cache
def ids() -> list[int]:
    return tokens(288, LENGTH)


@cache
def logits() -> np.ndarray:
    """transformers', weights rounded to fp16."""
    return half_logits_of(build_gemma4(**MODEL), ids())


def choices() -> list[int]:
    return [int(token) for token in logits().argmax(1)]


@pytest.fixture(scope="module", params=["four", "three"])
def runtime(request: pytest.FixtureRequest) -> Callable[[], AppHost]:
    """A new session."""
    made = authored_folder({"layout": FOUR if request.param == "four" else THREE})
    return lambda: AppHost(made)


def test_decode(runtime: Callable[[], AppHost]) -> None:
    assert_decodes(runtime())


def assert_decodes(session: AppHost) -> None:
    found = [session.decode(token) for token in ids()]
    np.testing.assert_allclose([logit for _, logit in found], logits().max(1), atol=1e-3)
    assert [token for token, _ in found] == choices()


@pytest.mark.parametrize("layout", MERGED)
def test_merged_packages_decode(layout: str) -> None:
    """One package owns all caches; what layers share stays inside."""
    folder = authored_folder({"layout": MERGED[layout]}, owned=[SHARED])
    assert_decodes(AppHost(folder))
    assert folder.chunks == CHUNKS[len(folder.chunks)]


def test_merged_packages_prefill_with_four() -> None:
    """As their published split of E2B: half of the owners, all of them, half of the readers."""
    checkpoint = InMemoryCheckpoint(build_gemma4(**MODEL))
    _, prefill = planners(checkpoint, app_recipe(layout=MERGED["one"]))
    members = prefill.members.values()
    layers = [sorted({b.layer for b in m if not isinstance(b, Head)}) for m in members]
    assert layers == [[0, 1, 2], [3, 4, 5], [6], [7]]


@pytest.mark.parametrize("length", [1, 2, WINDOW - 1, WINDOW, WINDOW + 1, PREFILL])
def test_prefill_and_decode(runtime: Callable[[], AppHost], length: int) -> None:
    """Prompts longer than the window too, though their one mask is causal alone."""
    session = runtime()
    token, logit = session.prefill(ids()[:length])
    assert (token, logit) == (
        choices()[length - 1],
        pytest.approx(logits()[length - 1].max(), 1e-3),
    )
    for position in range(length, length + 4):
        assert session.decode(ids()[position])[0] == choices()[position]


@pytest.mark.parametrize("length", [1, WINDOW - 2, WINDOW - 1, WINDOW, PREFILL])
@pytest.mark.parametrize("accepted", [0, 1, 2, DRAFTS])
def test_verify_and_accept(runtime: Callable[[], AppHost], length: int, accepted: int) -> None:
    """Drafts beyond the accepted ones are wrong, and leave nothing behind."""
    session = runtime()
    session.prefill(ids()[:length])
    drafts = ids()[length : length + accepted]
    wrong = [(token + 1) % 288 for token in ids()[length + accepted : length + DRAFTS]]
    found = session.verify(drafts + wrong)
    assert found[:accepted] == choices()[length : length + accepted]
    session.commit(accepted)
    at = length + accepted
    assert session.verify(ids()[at : at + DRAFTS]) == choices()[at : at + DRAFTS]
    session.commit(DRAFTS)
    assert session.decode(ids()[at + DRAFTS])[0] == choices()[at + DRAFTS]


def test_their_rule_in_prefill(
    runtime: Callable[[], AppHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same packages with their mask as it is: right up to the window, wrong beyond it."""
    monkeypatch.setattr(Adapter, "mask", lambda _, value: value)
    session = runtime()
    assert session.prefill(ids()[:WINDOW])[1] == pytest.approx(logits()[WINDOW - 1].max(), 1e-3)
    off = session.prefill(ids()[:PREFILL])[1] - logits()[PREFILL - 1].max()
    assert abs(off) > 0.01


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("coreml-llm")
    build_gemma4(**MODEL).save_pretrained(root / "checkpoint")
    build_tokenizer().save_pretrained(root / "checkpoint")
    export(app_recipe(), open_checkpoint(root / "checkpoint"), root / "out", lambda *_: None)
    return root / "out"


def test_the_folder_prefills_verifies_and_decodes(folder: Path) -> None:
    session = AppHost(read_folder(folder))
    found = {PREFILL - 1: session.prefill(ids()[:PREFILL])[0]}
    for position in range(PREFILL, PREFILL + 3):
        found[position] = session.decode(ids()[position])[0]
    at = PREFILL + 3
    found |= dict(enumerate(session.verify([*ids()[at : at + 2], 0])[:2], at))
    session.commit(2)
    found |= dict(enumerate(session.verify(ids()[at + 2 : at + 5]), at + 2))
    session.commit(3)
    found[at + 5] = session.decode(ids()[at + 5])[0]
    top = np.sort(logits(), 1)
    clear = top[:, -1] - top[:, -2] > 0.1  # int8 embeddings move what is nearly equal
    judged = [position for position in found if clear[position]]
    assert len(judged) > len(found) // 2
    assert [found[p] for p in judged] == [choices()[p] for p in judged]


@pytest.mark.parametrize("scale", [1.0, 0.125])
def test_the_config_has_the_factors_of_the_graphs(
    folder: Path, tmp_path: Path, scale: float
) -> None:
    """Graphs whose residual stream is scaled expect rows of that scale."""
    options = {"layout": FOUR, "family": {"residual_scale": scale}}
    checkpoint = open_checkpoint(folder.parent / "checkpoint")
    planner, *_ = planners(checkpoint, app_recipe(**options))
    write_config(planner, checkpoint, tmp_path)
    config = json.loads((tmp_path / "model_config.json").read_text())
    rows, per_layer = (
        checkpoint.read(f"model.{name}.weight").half().float().numpy()
        for name in ("embed_tokens", "embed_tokens_per_layer")
    )
    scaled = replace(
        authored_folder(options),
        embed=lambda token: rows[token] * config["embed_scale"],
        per_layer=lambda token: per_layer[token] * config["per_layer_embed_scale"],
    )
    assert_decodes(AppHost(scaled))


def test_the_contract_is_kept(folder: Path) -> None:
    assert check(folder) == []
    assert sorted(path.stem for path in folder.glob("*.mlpackage")) == [
        *(f"chunk{i}" for i in (1, 2, 3, 4)),
        *(f"prefill_chunk{i}" for i in (1, 2, 3, 4)),
    ]
    assert load(folder / "chunk1.mlpackage").default == "decode_q1"
    beside = [p for p in folder.rglob("*") if p.is_file() and ".mlpackage/" not in p.as_posix()]
    assert {p.relative_to(folder).as_posix() for p in beside} <= set(FILES)


def swap(folder: Path, name: str, other: str) -> None:
    """One package in the place of another."""
    shutil.rmtree(folder / f"{name}.mlpackage")
    shutil.copytree(folder / f"{other}.mlpackage", folder / f"{name}.mlpackage")


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "model_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def respecify(folder: Path, package: str, change: Callable[[Any], None]) -> None:
    """Change a package's specification; `change` gets the program's functions by name."""
    from cetane.mil.proto import model_message

    path = next((folder / f"{package}.mlpackage").glob("Data/*/model.mlmodel"))
    spec = model_message()()
    spec.ParseFromString(path.read_bytes())
    change(spec)
    path.write_bytes(spec.SerializeToString())


def rename(folder: Path, package: str, function: str, old: str, new: str) -> None:
    """An input or an output under another name."""

    def change(spec: Any) -> None:
        body = spec.mlProgram.functions[function]
        block = body.block_specializations[body.opset]
        for item in body.inputs:
            if item.name == old:
                item.name = new
        for op in block.operations:
            for argument in op.inputs.values():
                for binding in argument.arguments:
                    if binding.name == old:
                        binding.name = new
            for value in op.outputs:
                if value.name == old:
                    value.name = new
        for index, name in enumerate(block.outputs):
            if name == old:
                block.outputs[index] = new

    respecify(folder, package, change)


def drop(folder: Path, package: str, function: str) -> None:
    """Of the program and of its description."""

    def change(spec: Any) -> None:
        del spec.mlProgram.functions[function]
        others = [one for one in spec.description.functions if one.name != function]
        del spec.description.functions[:]
        spec.description.functions.extend(others)

    respecify(folder, package, change)


def other_default(spec: Any) -> None:
    spec.description.defaultFunctionName = "verify_qK"


def retype(folder: Path, package: str, function: str, name: str, shape: tuple[int, ...]) -> None:
    """An input in another shape."""

    def change(spec: Any) -> None:
        for item in spec.mlProgram.functions[function].inputs:
            if item.name == name:
                for dimension, size in zip(item.type.tensorType.dimensions, shape, strict=True):
                    dimension.constant.size = size

    respecify(folder, package, change)


DAMAGES: list[tuple[Callable[[Path], Any], str]] = [
    (lambda f: (f / "cos_full.npy").unlink(), "cos_full.npy"),
    (lambda f: np.save(f / "cos_full.npy", np.zeros((64, 32), np.float16)), r"shape \(64, 32\)"),
    (lambda f: (f / "embed_tokens_q8.bin").write_bytes(b"x"), "has 1 bytes"),
    (lambda f: shutil.rmtree(f / "chunk1.mlpackage"), "chunk1"),
    (lambda f: edit(f, context_length=128), r"causal_mask_full of shape \(1, 1, 1, 64\), not"),
    (lambda f: edit(f, sliding_window=16), "causal_mask_sliding of shape"),
    (lambda f: edit(f, vocab_size=None), "vocab_size = None"),
    (lambda f: edit(f, embed_scale=16.0), "embed_scale = 16.0, but the model's is 8"),
    (lambda f: edit(f, embed_scale=0), "embed_scale = 0"),
    (lambda f: edit(f, per_layer_embed_scale="4"), "per_layer_embed_scale = '4'"),
    (lambda f: edit(f, per_layer_embed_scale=0.5), "per_layer_embed_scale = 0.5"),
    (lambda f: edit(f, layer_types=["full_attention"]), "layer_types are not"),
    (lambda f: edit(f, num_kv_shared_layers=8), "num_kv_shared_layers = 8"),
    (lambda f: edit(f, num_kv_shared_layers=3), "packages have 6 caches, not 5"),
    (lambda f: edit(f, context_length=32), "prefill of 40 tokens does not fit"),
    (lambda f: (f / "model_config.json").write_text("{"), "model_config.json"),
    (lambda f: os.truncate(f / "model_config.json", LARGEST + 1), "model_config.json is larger"),
    (lambda f: (f / "hf_model" / "tokenizer.json").unlink(), "tokenizer.json is missing"),
    (lambda f: shutil.rmtree(f / "prefill_chunk3.mlpackage"), "prefill_chunk3"),
    (lambda f: swap(f, "prefill_chunk1", "prefill_chunk2"), "prefill_chunk1: nothing gives per_"),
    (lambda f: swap(f, "prefill_chunk3", "chunk3"), "prefill_chunk3: functions decode_q1, verify"),
    (lambda f: swap(f, "chunk3", "prefill_chunk3"), "functions are decode_q1, verify_qK; main"),
    (lambda f: swap(f, "chunk4", "chunk3"), "chunk4/verify_qK: gives no token_ids"),
    (lambda f: drop(f, "chunk2", "verify_qK"), "main everywhere, or decode_q1 and verify_qK"),
    (lambda f: respecify(f, "chunk2", other_default), "verify_qK is its default function"),
    (lambda f: rename(f, "chunk1", "verify_qK", "new_K_full", "x"), "gives no new_K_full"),
    (lambda f: rename(f, "chunk1", "verify_qK", "update_indicator", "update_mask"),
     "chunk1/verify_qK: nothing gives update_mask"),
    (lambda f: rename(f, "chunk2", "verify_qK", "kv13_k", "x"), "chunk3/.*nothing gives kv13_k"),
    (lambda f: retype(f, "chunk3", "verify_qK", "kv13_k", (1, 1, WINDOW, 16)),
     r"chunk3.mlpackage: function verify_qK: matmul .* is declared fp16 \(1, 1, 12, 35\)"),
    (lambda f: rename(f, "prefill_chunk1", "main", "causal_mask", "causal_mask_full"),
     "prefill_chunk1: nothing gives causal_mask_full"),
    (lambda f: rename(f, "prefill_chunk1", "main", "K2", "K3"), "prefill_chunk1: gives no K2"),
    (lambda f: rename(f, "prefill_chunk2", "main", "kv14_v", "V1"), "gives no kv14_v"),
    (lambda f: retype(f, "prefill_chunk2", "main", "cos_f", (1, 1, 39, 32)),
     "prefill_chunk2.mlpackage: function main: .* declared fp16"),
    (lambda f: rename(f, "prefill_chunk4", "main", "last_position_mask", "last"),
     "prefill_chunk4: no last_position_mask"),
    (lambda f: rename(f, "prefill_chunk4", "main", "token_id", "id"), "gives no token_id"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "problem"), DAMAGES)
def test_a_damaged_folder(
    folder: Path, tmp_path: Path, damage: Callable[[Path], Any], problem: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    damage(copy)
    problems = check(copy)
    assert any(re.search(problem, found) for found in problems), problems


def test_a_cache_without_axes() -> None:
    """No package that cetane writes has one, but a stranger's may."""
    keys = {"K_sliding_in": TensorType((), "fp16"), "K_full_in": TensorType((2, 1, 8, 8), "fp16")}
    assert caches(MilFunction("main", keys, {}, {}, Body((), (), ()))) == {"full": 2}


def test_compiled_packages_are_there(folder: Path, tmp_path: Path) -> None:
    """What the printed command leaves on a Mac."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    for package in copy.glob("*.mlpackage"):
        package.rename(package.with_suffix(".mlmodelc"))
    assert check(copy) == []
    shutil.rmtree(copy / "prefill_chunk2.mlmodelc")
    assert [problem.partition(":")[0] for problem in check(copy)] == ["prefill_chunk2"]


class Served:
    """What `replace_package` takes of a bundle, without building one."""

    def __init__(self, path: Path) -> None:
        self.path, content = path, json.loads((path / "recipe.json").read_text())
        self.plan = type("Plan", (), {"recipe": app_recipe(**content)})
        self.digest = json.dumps(content)

    def verify(self) -> None: ...


@pytest.fixture
def served(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """`served(**recipe)`: the path of a bundle of the exported model, of this recipe."""
    checkpoint = open_checkpoint(folder.parent / "checkpoint")
    monkeypatch.setattr("cetane.pipeline.replacement.Bundle", Served)
    monkeypatch.setattr("cetane.pipeline.replacement.own_checkpoint", lambda *_: checkpoint)

    def bundle(**options: Any) -> Path:
        path = Path(tempfile.mkdtemp(dir=tmp_path))
        (path / "recipe.json").write_text(json.dumps(options))
        return path

    return bundle


def test_one_package_anew(folder: Path, tmp_path: Path, served: Callable[..., Path]) -> None:
    """A chunk4 for another context is named; its rebuild takes its place; another context's does
    not (the published log's rebuild_chunk4_8k)."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    before = digests(copy / "chunk4.mlpackage")
    short = served(context=CONTEXT * 2)
    refused = replace_package(short, copy, "coreml-llm", "chunk4")
    assert any("chunk4" in p and "causal_mask_full of shape" in p for p in refused.problems)
    assert digests(copy / "chunk4.mlpackage") == before and check(copy) == []
    shutil.rmtree(copy / "chunk4.mlpackage")
    replace_package(short, copy, "coreml-llm", "chunk4")
    assert not check_folder(copy).passed
    origin = Origin(bundle="{}", files=records(folder, folder))
    (copy / "cetane.json").write_text(origin.model_dump_json())
    assert replace_package(served(), copy, "coreml-llm", "chunk4").passed
    assert (copy / "cetane.json").exists()  # the digest of `served()` is {}
    another = origin.model_copy(update={"bundle": "another"})
    (copy / "cetane.json").write_text(another.model_dump_json())
    assert replace_package(served(), copy, "coreml-llm", "chunk4").passed
    assert not (copy / "cetane.json").exists()  # packages of two bundles
    assert digests(copy / "chunk4.mlpackage") == before
    assert check_folder(copy).passed
    with pytest.raises(CetaneError, match="no package 'chunk5'"):
        replace_package(served(), copy, "coreml-llm", "chunk5")
    with pytest.raises(CetaneError, match="no such folder"):
        replace_package(served(), tmp_path / "none", "coreml-llm", "chunk4")
    with pytest.raises(CetaneError, match=r"has none of meta\.yaml, model_config\.json"):
        check_folder(tmp_path)


def digests(package: Path) -> dict[str, str]:
    return {p.name: sha256(p) for p in package.rglob("*") if p.is_file()}


def small() -> InMemoryCheckpoint:
    return InMemoryCheckpoint(build_gemma4(**MODEL))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"contract": "readonly", "sliding": "readonly"}, "full layers have blend caches"),
        ({"sliding": "blend"}, "sliding layers have shift caches"),
        ({"layout": {"kind": "per-layer"}}, "1 to 4 packages"),
        ({"layout": FOUR | {"cuts": [4]}}, "owns all caches: layers up to 6, .* cut at 4"),
        ({"windowed": False}, "keep a window"),
        (
            {"capacities": (32,), "tokens": {"verify": 3, "prefill": 8}},
            "has caches of one length",
        ),
        ({"embedding": {"format": "int4"}}, "keeps rows of the embedding in int8"),
        ({"layout": FOUR | {"cuts": [2, 4, 7]}}, "own all caches: layers up to 6, .* 2, 4, 7"),
    ],
)
def test_bundles_that_their_runtime_cannot_load(options: Any, message: str) -> None:
    with pytest.raises(CetaneError, match=message):
        planners(small(), app_recipe(**options))


def test_a_window_that_is_no_multiple_of_32() -> None:
    """It is refused before any package is lowered."""
    checkpoint = InMemoryCheckpoint(build_gemma4(**MODEL | {"sliding_window": 24}))
    with pytest.raises(CetaneError, match="window of 24 tokens, but cetane's hold 32"):
        planners(checkpoint, app_recipe())


def test_a_head_that_chooses_among_too_many_rows() -> None:
    """Gemma's own vocabulary is wider than an argmax that is right on the ANE."""
    wide = {"vocab_size": 65_537, "vocab_size_per_layer_input": 65_537, "hidden_size": 32}
    checkpoint = InMemoryCheckpoint(build_gemma4(**MODEL | wide))
    with pytest.raises(CetaneError, match="a slice here has 65,537") as caught:
        planners(checkpoint, app_recipe(head={"slices": 1}))
    assert caught.value.hint == "port with --set head.slices=2"
    assert planners(checkpoint, app_recipe(head={"slices": 2}))


def test_modes_that_a_bundle_does_not_have() -> None:
    (only,) = planners(small(), app_recipe(tokens={"verify": 0, "prefill": 0}))
    assert [graph.function.name for graph in only.graphs("chunk-00")] == ["main"]


E2B = [FULL if layer % 5 == 4 else SLIDING for layer in range(35)]
E4B = [FULL if layer % 6 == 5 else SLIDING for layer in range(42)]


@pytest.mark.parametrize(
    ("kinds", "shared", "name", "verifies"),
    [
        (E2B, 20, "gemma4-4chunk", True),
        (E2B, 20, "gemma4-3chunk", True),
        (E2B, 20, "gemma4-2chunk", False),
        (E4B, 18, "gemma4-e4b-4chunk", False),
    ],
)
def test_verify_for_the_caches_that_the_runtime_commits(
    kinds: list[str], shared: int, name: str, verifies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers are those of the released models."""
    monkeypatch.setattr("cetane.export.coreml_llm.contract.COMMITTED", OF_E2B)
    layers = {"num_hidden_layers": len(kinds), "layer_types": kinds}
    model = build_gemma4(**layers, num_kv_shared_layers=shared, max_position_embeddings=4096)
    shipped = load_recipe(name).model_copy(update={"compression": app_recipe().compression})
    planner, *_ = planners(InMemoryCheckpoint(model), shipped)
    assert ("verify_qK" in planner.modes) is verifies


def test_verify_that_the_runtime_commits_wrongly(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cetane.export.coreml_llm.contract.COMMITTED", OF_E2B)
    assert check(folder) == [
        "chunk1: verify_qK, but the runtime writes verified columns as for E2B"
    ]


def test_other_models() -> None:
    checkpoint = InMemoryCheckpoint(build_gemma3())
    with pytest.raises(CetaneError, match="is for Gemma 4"):
        planners(checkpoint, recipe(layout={"kind": "single"}))


def test_a_model_without_sliding_layers() -> None:
    model = build_gemma4(**MODEL | {"layer_types": [FULL] * len(KINDS)})
    with pytest.raises(CetaneError, match="sliding and full layers, this model has only full"):
        planners(InMemoryCheckpoint(model), app_recipe(sliding=None))
