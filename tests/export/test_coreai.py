"""The folder for Core AI: in Apple's own runtime, driven as their engine does, it is the model."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import InMemoryCheckpoint, build_model
from tests.families.alibi_models import build_alibi
from tests.families.gemma_models import FULL, SLIDING, build_gemma3, build_gemma4
from tests.families.parity import tokens
from tests.lower.half_weights import half_logits_of

from cetane.bundle import Bundle
from cetane.checkpoint import open_checkpoint
from cetane.compress import parse_format
from cetane.errors import CetaneError
from cetane.export.coreai import AssetRunner, contract
from cetane.export.coreai.adapter import CoreAIAdapter, window_columns
from cetane.export.coreai.check import check, rules
from cetane.export.coreai.converter import Converter, import_coreai
from cetane.export.coreai.folder import (
    add_embedding,
    constrain,
    convert,
    metadata,
    write_tokenizer,
)
from cetane.export.coreai.planner import planners
from cetane.export.coreai.runner import array
from cetane.gates import coreai as gate
from cetane.pipeline.export import export_coreai
from cetane.schema.interface import MASKED, Mask
from cetane.schema.recipe import parse_recipe

needs_coreai = pytest.mark.skipif(
    find_spec("coreai_torch") is None, reason="the extra coreai is not installed"
)

CONTEXT, WINDOW = 256, 48
MODELS: dict[str, Callable[[], Any]] = {
    "llama": partial(build_model, "llama", tie_word_embeddings=True),
    "qwen3": partial(build_model, "qwen3"),
    "gemma3": partial(
        build_gemma3,
        num_hidden_layers=2,
        layer_types=[SLIDING, FULL],
        sliding_window=WINDOW,
        max_position_embeddings=CONTEXT,
    ),
}
FORMATS = (
    "fp16", "int8-per-channel", "int8-per-tensor", "int4-per-channel", "int4-per-block32",
    "palette1-kmeans-group8", "palette2-kmeans-group8", "palette3-uniform-per-tensor",
    "palette4-kmeans-group32", "palette6-uniform-per-tensor", "palette8-kmeans-per-tensor",
)  # fmt: skip


def recipe(context: int = CONTEXT, **tables: Any) -> Any:
    return parse_recipe({"name": "test", "cache": {"context": context}} | tables, "test")


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@needs_coreai
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_tokens_are_those_of_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside the first block, and at positions past it; for Gemma past its window, and in a second
    context. Calls take 8 tokens: a conversion of wider ones takes as long."""
    monkeypatch.setattr(contract, "WIDTHS", {contract.EXTEND: (8,), contract.PROMPT: (8,)})
    if name == "gemma3":
        monkeypatch.setattr(contract, "SHORTEST", CONTEXT // contract.STEP_UP)
    model = MODELS[name]()
    ids = tokens(288, 96)
    truth = half_logits_of(model, ids)
    made = planners(InMemoryCheckpoint(model), recipe())
    program = convert(made, InMemoryCheckpoint(model), lambda *_: None)
    assert check(program) == []
    program.save_asset(tmp_path / "made.aimodel")
    with AssetRunner(tmp_path / "made.aimodel") as runner:
        assert runner.contexts == ([64, 256] if name == "gemma3" else [256])
        fed = 0
        for place in (5, 11, 12, 20, 93):
            logits, fed = runner.feed(ids[fed:place]), place
            assert cosine(logits, truth[place - 1]) > 0.9999, place
        answer = ids[:fed]
        for _ in range(4):
            answer.append(int(logits.argmax()))
            logits = runner.feed(answer[-1:])
        with torch.no_grad():
            scores = model(torch.tensor([answer])).logits[0].numpy()
        assert [int(row.argmax()) for row in scores[fed - 1 : -1]] == answer[fed:]
        runner.start()
        assert cosine(runner.feed(ids[:7]), truth[6]) > 0.9999
        with pytest.raises(CetaneError, match="beyond the asset's context of 256"):
            runner.feed([1] * CONTEXT)


@needs_coreai
def test_every_format_decodes_to_the_weight_of_the_bundle(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).standard_normal((64, 64, 1, 1)).astype(np.float16)
    encoded = {name: parse_format(name).encode(weight) for name in FORMATS}

    class Weights(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            stored = (torch.ops.cetane.half_constant(name, "64x64x1x1") for name in FORMATS)
            return tuple(weight * x for weight in stored)

    converter = Converter(lambda label: encoded[label])
    one = torch.ones(1, dtype=torch.float16)
    converter.add("load_embeddings", Weights(), [one], ["embedding_table"], FORMATS)
    program = converter.program()
    assert [warning.split(":")[0] for warning in check(program)] == ["int4"]
    asset = program.save_asset(tmp_path / "formats.aimodel")

    async def run() -> dict[str, np.ndarray]:
        from coreai.runtime import NDArray

        async with asset.executable() as opened:
            inputs = {"embedding_table": NDArray(np.ones(1, np.float16))}
            made = await opened.load_function("load_embeddings")(inputs)
            return {name: value.numpy().copy() for name, value in made.items()}

    import asyncio

    made = asyncio.run(run())
    for name, value in encoded.items():
        np.testing.assert_array_equal(made[name], value.decode(), name)
    size = sum(path.stat().st_size for path in asset.path.rglob("*"))
    stored = sum(parse_format(name).nbytes(weight.shape) for name in FORMATS)
    assert stored <= size < stored + 16_384  # packed to bits, each once


@needs_coreai
@pytest.mark.parametrize("rows", ["fp16", "int8"])
def test_a_table_whose_tokens_8_does_not_divide(rows: str, tmp_path: Path) -> None:
    """The runtime finds the model's rows, and the layout for the Neural Engine takes the table."""
    model = build_model(vocab_size=283)
    checkpoint = InMemoryCheckpoint(model)
    (planner,) = planners(checkpoint, recipe(embedding={"format": rows}))  # type: ignore[arg-type]
    converter = Converter({}.__getitem__)
    add_embedding(converter, planner, checkpoint)  # type: ignore[arg-type]
    program = converter.program()
    program.save_asset(tmp_path / "made.aimodel")
    ids = [0, 5, 276, 279, 280, 281, 282, 0]
    with AssetRunner(tmp_path / "made.aimodel") as runner:
        asked = {contract.TOKENS: array(np.array([ids], np.int32)), contract.TABLE: runner.table}
        found = runner.run(contract.gather_name(8), asked)[contract.ROWS].numpy()[0, :, 0]
    truth = model.get_input_embeddings().weight[ids].detach().numpy()
    step = np.abs(truth).max(1, keepdims=True) / 127 if rows == "int8" else 1e-3
    assert (np.abs(found - truth) <= step).all()
    constrain(program, [], CONTEXT)


@needs_coreai
def test_a_program_with_known_traps_is_named() -> None:
    class Trap(torch.nn.Module):
        def forward(self, x: torch.Tensor, *more: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return torch.softmax(x.float(), 1), x.argmax(1)

    converter = Converter(lambda label: pytest.fail(label))
    wide = torch.zeros((1, 70), dtype=torch.float16)
    converter.add("extend", Trap(), [wide] * 111, [], ["scores", "best"])
    named = {warning.split(":")[0]: warning for warning in check(converter.program())}
    assert set(named) == {"fp32", "selection", "ports", "last-axis"}
    assert "coreai.softmax" in named["fp32"]
    assert "coreai.argmax" in named["selection"]
    assert "113; 112 were seen to work" in named["ports"]
    assert "last axes of 70" in named["last-axis"]


def test_rules_have_dated_sources() -> None:
    for rule in rules().values():
        assert all(source.date >= "2026" and source.where for source in rule.sources)


@needs_coreai
def test_a_bundle_becomes_the_folder_that_their_runner_reads(
    tiny_bundle: Callable[..., Bundle], tmp_path: Path
) -> None:
    bundle = tiny_bundle(
        context=CONTEXT, embedding={"format": "int8"}, layout={"kind": "single"},
        compression={"default": "palette4-kmeans-group32"},
    )  # fmt: skip
    target = tmp_path / "tiny"
    made = export_coreai(bundle.path, target)
    assert made.result.passed and len(made.result.checks) == 15 and made.warnings == []
    assert "xcrun coreai-build compile tiny.aimodel" in made.compile
    with pytest.raises(CetaneError, match="exists"):
        export_coreai(bundle.path, target)
    files = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    asset = {f"tiny.aimodel/{name}" for name in ("main.mlirb", "main.hash", "metadata.json")}
    assert {name for name in files if not name.startswith("tokenizer/")} == {
        "metadata.json", *asset
    }  # fmt: skip
    assert {"tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"} < files
    content = json.loads((target / "metadata.json").read_text())
    assert content["metadata_version"] == "0.2" and content["kind"] == "llm"
    assert content["assets"] == {"main": "tiny.aimodel"}
    language = content["language"]
    assert (language["vocab_size"], language["max_context_length"]) == (288, CONTEXT)
    assert language["function_map"] == {
        "load_embeddings": ["load_embeddings"],
        "gather_embeddings": ["gather_embeddings_8", "gather_embeddings_64"],
        "extend": ["extend_256_8", "extend_256_64"],
        "prompt_opt": ["prompt_opt_256_64"],
    }
    stops = json.loads((target / "tokenizer/tokenizer_config.json").read_text())
    assert stops["additional_special_tokens"] == ["<eos>"] and language["eos_token_ids"] == [0]
    described(target / "tiny.aimodel")


@needs_coreai
def test_angles_of_late_positions(
    tiny_bundle: Callable[..., Bundle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are constants of the asset. No text that is judged from its start reaches these."""
    monkeypatch.setattr(contract, "WIDTHS", {contract.EXTEND: (8,), contract.PROMPT: (8,)})
    keep = CoreAIAdapter.register_buffer

    def wrong(adapter: Any, name: str, tensor: torch.Tensor) -> None:
        late = torch.arange(len(tensor)).clamp(max=100)
        keep(adapter, name, tensor[late] if name.startswith(("cos_", "sin_")) else tensor)

    monkeypatch.setattr(CoreAIAdapter, "register_buffer", wrong)
    bundle = tiny_bundle(context=CONTEXT, layout={"kind": "single"})
    checks = export_coreai(bundle.path, tmp_path / "tiny").result.checks
    red = {check.name for check in checks if not check.passed}
    assert red and all(name.endswith("at the end of the context") for name in red)


def test_names_and_stop_tokens(tiny_checkpoint_folder: Path, tmp_path: Path) -> None:
    """The model keeps its owner, and a stop token that the tokenizer lacks has no text."""
    checkpoint = open_checkpoint(tiny_checkpoint_folder)
    checkpoint.config["_name_or_path"] = "owner/tiny"
    content = metadata(planners(checkpoint, recipe()), checkpoint, "tiny")
    assert content["source"]["hf_model_id"] == content["language"]["tokenizer"] == "owner/tiny"
    write_tokenizer(replace(checkpoint.tokenizer, eos_ids=(0, 999, -1)), tmp_path)
    written = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert written["additional_special_tokens"] == ["<eos>"]


def described(asset: Path) -> None:
    """Compare an asset with the tables of `models/base.py` in apple/coreai-models, by hand."""
    from coreai.authoring import AIModelAsset

    text = str(AIModelAsset.load(asset).program)
    cache = (
        "!coreai.handle<tensor<2x1x32x1x256xf16, #coreaix.hw_constraints<IOSurface, "
        "alignments: [1x1x1x1x2048x1], interleave: [1x1x8x1x1]>>>"
    )
    head = text[text.index("@extend_256_8(") :].split("{\n", 1)[0]
    for port in (
        'tensor<1x8x1x64xf16> {coreai.name = "transformer_input"}',
        'tensor<1x8xui16> {coreai.name = "position_ids"}',
        'tensor<1xsi32> {coreai.name = "in_step"}',
        'tensor<1x256x1x8xf16> {coreai.name = "causal_mask"}',
        cache + ' {MutableBuffers.buffer_mutation = "key_cache", coreai.name = "key_cache"}',
        cache + ' {MutableBuffers.buffer_mutation = "value_cache", coreai.name = "value_cache"}',
        'tensor<1x1x8x288xf16> {coreai.name = "out_logits"}',
    ):
        assert port in head
    table = "tensor<288x1x64xsi8, #coreaix.hw_constraints<IOSurface, alignments: [1x1x1x1], "
    assert table + "interleave: [8x1x1]>>" in text[text.index("@load_embeddings(") :]


def test_a_window_hides_what_it_should() -> None:
    context, width, window = 32, 4, 5
    columns = window_columns(window, context, width)
    assert columns is not None
    for start in (0, 8, 28):
        seen = columns[context - start : 2 * context - start].numpy()
        for query in range(width):
            hidden = [key for key in range(context) if key <= start + query - window]
            assert np.flatnonzero(seen[:, query] == np.float16(MASKED)).tolist() == hidden
            assert set(np.unique(seen)) <= {0, np.float16(MASKED)}
    assert window_columns(None, context, width) is None
    assert window_columns(context, context, width) is None


@pytest.mark.parametrize(
    ("longest", "ladder"),
    [(256, (256,)), (512, (512,)), (1024, (256, 1024)), (4096, (256, 1024, 4096)),
     (8192, (512, 2048, 8192))],
)  # fmt: skip
def test_contexts_are_a_sparse_ladder(longest: int, ladder: tuple[int, ...]) -> None:
    assert contract.contexts(longest) == ladder


@pytest.mark.parametrize(("longest", "near"), [(128, 256), (384, 256), (3000, 2048)])
def test_a_context_beside_the_ladder_is_refused(longest: int, near: int) -> None:
    with pytest.raises(CetaneError, match=f"context = {longest}") as refused:
        contract.contexts(longest)
    assert refused.value.hint == f"port with cache.context = {near}"


def test_positions_are_16_bit() -> None:
    with pytest.raises(CetaneError, match="to 65536"):
        contract.contexts(1 << 17)


SCORES = {"source": "", "model_type": "", "method": "mass", "settings": {}, "layers": [[0.1, 0.2]]}
STREAMING = {"sinks": 0, "scores": SCORES}


@pytest.mark.parametrize(
    ("build", "tables", "message"),
    [
        (partial(build_model, "zaya"), {}, "no place for the histories of zaya"),
        (build_gemma4, {}, "beside its embedding and caches"),
        (partial(build_alibi, "bloom", num_attention_heads=8), {}, "makes masks without distances"),
        (partial(build_gemma3, max_position_embeddings=256),
         {"family": {"full_window": 64, "sinks": 4}}, "cannot keep the first tokens"),
        (build_model, {"cache": {"context": CONTEXT, "streaming": STREAMING}},
         "Core AI's host has one cache for a layer, but heads of recipe .* stream"),
        (build_model, {"embedding": {"format": "int4"}},
         "Core AI's host keeps rows of the embedding in int8 or fp16, but .* int4"),
    ],
)  # fmt: skip
def test_what_the_contract_cannot_hold_is_refused(
    build: Callable[[], Any], tables: dict[str, Any], message: str
) -> None:
    checkpoint = InMemoryCheckpoint(build())
    checkpoint.config["max_position_embeddings"] = CONTEXT
    with pytest.raises(CetaneError, match=message) as refused:
        planners(checkpoint, recipe(**tables))  # type: ignore[arg-type]
    assert refused.value.hint is not None


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "coreai_torch", None)
    with pytest.raises(CetaneError, match="Core AI's packages are not installed") as refused:
        import_coreai()
    assert refused.value.hint is not None and "coreai-torch==" in refused.value.hint


def test_a_bundle_without_logits_is_refused_at_once(
    tiny_bundle: Callable[..., Bundle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing could be judged; it was found after the conversion."""
    bundle = tiny_bundle(context=CONTEXT, layout={"kind": "single"}, head={"choose": True})
    monkeypatch.setattr("cetane.export.coreai.export", None)
    with pytest.raises(CetaneError, match="gives choices, not logits") as refused:
        export_coreai(bundle.path, tmp_path / "out")
    assert refused.value.hint == "port with --set head.choose=false"


class Echo:
    """A runner that gives the bundle's own logits, changed."""

    def __init__(
        self,
        truth: np.ndarray,
        change: Callable[[np.ndarray], np.ndarray],
        ending: np.ndarray | None = None,
    ) -> None:
        """`ending` are the logits at the end of the context; without it, `truth` again."""
        self.truth, self.change, self.fed = truth, change, 0
        self.ending = truth if ending is None else ending

    def __enter__(self) -> "Echo":
        return self

    def __exit__(self, *_: object) -> None: ...

    def start(self, _: int) -> None:
        self.truth, self.fed = self.ending, 0

    def feed(self, ids: Any) -> np.ndarray:
        self.fed += len(ids)
        return self.change(self.truth[self.fed - 1])


@pytest.mark.parametrize(
    ("change", "passes"),
    [(lambda row: row, True), (lambda row: row.astype(np.float16), True),
     (np.negative, False), (lambda row: 1.2 * row, False), (lambda row: np.roll(row, 1), False),
     (lambda row: np.full_like(row, np.nan), False)],
)  # fmt: skip
def test_the_gate_refuses_other_logits(
    change: Callable[[np.ndarray], np.ndarray],
    passes: bool,
    tiny_bundle: Callable[..., Bundle],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bundle = tiny_bundle(
        context=CONTEXT, embedding={"format": "int8"}, layout={"kind": "single"},
        compression={"default": "palette4-kmeans-group32"},
    )  # fmt: skip
    from cetane.engine.engine import Engine
    from cetane.engine.portable import PortableBackend
    from cetane.gates.probes import text_tokens

    engine = Engine(bundle.plan, PortableBackend(bundle), bundle.tables())
    ids = text_tokens(bundle.tokenizer, 80)
    truth, ending = (
        engine.session(start=start).feed(ids[:count], "all")
        for start, count in ((0, 80), (CONTEXT - 64, 64))
    )
    assert truth is not None
    monkeypatch.setattr(gate, "AssetRunner", lambda asset: Echo(truth, change, ending))
    assert gate.judge_coreai(bundle, Path("unused")).passed is passes


@pytest.mark.parametrize(
    ("longest", "window", "most"),
    [(256, None, 80), (512, None, 80), (1024, None, 300), (2048, None, 556), (8192, None, 556),
     (1024, 512, 556), (1024, 1000, 1024), (512, 128, 172), (8192, 4096, 556)],
)  # fmt: skip
def test_the_gate_crosses_the_end_of_the_first_context_and_of_a_window(
    longest: int, window: int | None, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their engine takes the shortest context that holds a position; the first has at least 256."""
    ladder, fed, started = contract.contexts(longest), [0], list[int]()

    class Counter(Echo):
        def start(self, first: int) -> None:
            started.append(first)
            fed.append(0)
            super().start(first)

        def feed(self, ids: Any) -> np.ndarray:
            fed[-1] += len(ids)
            return super().feed(ids)

    truth = np.eye(1100, 288, dtype=np.float32)

    def told(tokens: Any, wanted: str) -> np.ndarray:
        return truth[len(tokens) - 1] if wanted == "last" else truth[: len(tokens)]

    engine = SimpleNamespace(session=lambda **_: SimpleNamespace(feed=told))
    mask = SimpleNamespace(source=Mask(group="full", window=window))
    plan = SimpleNamespace(
        recipe=SimpleNamespace(
            cache=SimpleNamespace(context=longest), head=SimpleNamespace(choose=False)
        ),
        functions={("shard", "decode"): SimpleNamespace(inputs=(mask,))},
    )
    bundle: Any = SimpleNamespace(path="bundle", plan=plan, tokenizer=None, tables=dict)
    monkeypatch.setattr(gate, "AssetRunner", lambda asset: Counter(truth, lambda row: row))
    monkeypatch.setattr(gate, "Engine", lambda *_: engine)
    monkeypatch.setattr(gate, "PortableBackend", lambda _: None)
    monkeypatch.setattr(gate, "text_tokens", lambda _, length: tuple(range(length)))
    gate.judge_coreai(bundle, Path("unused"))
    assert fed[0] == most and (most > ladder[0]) is (len(ladder) > 1)
    assert (started, fed[1:]) == (([], []) if most == longest else ([longest - 64], [64]))
    assert bool(gate.unjudged(plan)) is (window == 4096)  # type: ignore[arg-type]
