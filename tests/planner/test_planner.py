"""Plans: shards, functions, bytes. Sizes by hand for the tiny llama of tests/conftest.py."""

import json
from itertools import product
from typing import Any

import numpy as np
import pytest
from tests.conftest import InMemoryCheckpoint, UnreadCheckpoint, build_model
from tests.planner.plans import assert_modules_fit, plan, planner

from cetane.errors import CetaneError
from cetane.planner import Planner
from cetane.schema.interface import (
    FromCache,
    FromTensor,
    ToCache,
    ToLogits,
    ToTensor,
)
from cetane.schema.plan import Plan
from cetane.schema.recipe import parse_recipe
from cetane.schema.slots import CONTRACTS

LAYER = 64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 96 * 64  # q, k and v, o, mlp
GAINS = 2 * 64  # two norms a layer


@pytest.mark.parametrize(
    ("layers", "layout", "slices", "shards"),
    [
        (2, {"kind": "single"}, 3, {"model": "layer-00 layer-01 head-0 head-1 head-2"}),
        (
            2,
            {"kind": "per-block"},
            2,
            {
                "layer-00": "layer-00",
                "layer-01": "layer-01",
                "head-0": "head-0",
                "head-1": "head-1",
            },
        ),
        (
            2,
            {"kind": "per-layer"},
            1,
            {"layer-00": "layer-00", "layer-01": "layer-01", "head-0": "head-0"},
        ),
        (2, {}, 1, {"chunk-00": "layer-00", "chunk-01": "layer-01", "head-0": "head-0"}),
        (3, {"chunks": 1}, 1, {"chunk-00": "layer-00 layer-01 layer-02", "head-0": "head-0"}),
        (
            7,
            {},
            1,
            {
                "chunk-00": "layer-00",
                "chunk-01": "layer-01 layer-02",
                "chunk-02": "layer-03 layer-04",
                "chunk-03": "layer-05 layer-06",
                "head-0": "head-0",
            },
        ),
        (
            6,
            {},
            1,
            {
                "chunk-00": "layer-00 layer-01",
                "chunk-01": "layer-02 layer-03",
                "chunk-02": "layer-04 layer-05",
                "head-0": "head-0",
            },
        ),
    ],
)
def test_shards(layers: int, layout: dict[str, Any], slices: int, shards: dict[str, str]) -> None:
    made = plan({"num_hidden_layers": layers}, layout=layout, head={"slices": slices})
    assert {shard.name: " ".join(shard.blocks) for shard in made.shards} == shards
    kinds = {shard.name: shard.kind for shard in made.shards}
    named = {"model": "model", "head-": "head", "chunk": "layers", "layer": "layers"}
    assert kinds == {name: named[name[:5]] for name in shards}
    for mode in made.modes.values():
        assert [step.shard for step in mode.steps] == list(shards)


def test_chunks_are_alike_where_kinds_of_layers_repeat() -> None:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    for layers, chunks in ((kinds * 3, 3), (kinds * 4, 4), ([*kinds * 2, kinds[0]], 4)):
        model = build_model("gemma3_text", num_hidden_layers=len(layers), layer_types=layers)
        recipe = parse_recipe({"name": "test", "cache": {"context": 128}}, "test")
        made = Planner(UnreadCheckpoint(model), recipe).plan()
        assert sum(shard.kind == "layers" for shard in made.shards) == chunks


def test_more_chunks_than_layers() -> None:
    with pytest.raises(CetaneError, match=r"layout.chunks = 3: the model has 2 layers"):
        plan(layout={"chunks": 3})


@pytest.mark.parametrize(
    ("tokens", "widths"),
    [
        ({}, {"decode": 1, "verify": 8, "prefill": 64}),
        ({"verify": None}, {"decode": 1, "prefill": 64}),
        ({"prefill": None, "verify": 7}, {"decode": 1, "verify": 7}),
        ({"prefill": None, "verify": None}, {"decode": 1}),
    ],
)
def test_functions_and_modes(tokens: dict[str, Any], widths: dict[str, int]) -> None:
    made = plan(tokens=tokens)
    assert {mode: step.tokens for mode, step in made.modes.items()} == widths
    for mode, steps in made.modes.items():
        assert {step.function for step in steps.steps} == {mode}
    for shard in made.shards:
        assert {f.name: f.tokens for f in shard.functions} == widths


def test_flexible_shapes_are_one_function() -> None:
    made = plan(tokens={"shapes": "range"})
    assert {mode: step.tokens for mode, step in made.modes.items()} == {
        "decode": 1,
        "verify": 8,
        "prefill": 64,
    }
    assert {step.function for mode in made.modes.values() for step in mode.steps} == {"main"}
    assert {f.name: f.tokens for s in made.shards for f in s.functions} == {"main": 1}


def test_ports_by_hand() -> None:
    """A chunk of a readonly plan in the default layout, for 8 tokens and 128 slots."""
    function = plan().by_name["chunk-01"].functions[1]
    assert {item.name: item.shape for item in function.inputs} == {
        "hidden": (1, 64, 1, 8),
        "rope_cos": (1, 1, 16, 8),
        "rope_sin": (1, 1, 16, 8),
        "mask": (1, 1, 8, 136),
        "kv_k": (1, 2, 16, 128),
        "kv_v": (1, 2, 16, 128),
    }
    assert {item.name: item.shape for item in function.outputs} == {
        "hidden_out": (1, 64, 1, 8),
        "kv_k_out": (1, 2, 16, 8),
        "kv_v_out": (1, 2, 16, 8),
    }


@pytest.mark.parametrize("order", ["c1t", "ct1"])
def test_tensor_layouts(order: str) -> None:
    prefill = plan(tensor_layout=order, head={"slices": 2}).by_name["head-1"].functions[2]
    assert prefill.tokens == 64
    tokens = (1, 64) if order == "c1t" else (64, 1)
    assert [item.shape for item in prefill.inputs] == [(1, 64, *tokens)]
    assert [item.shape for item in prefill.outputs] == [(1, 160, *tokens)]
    assert prefill.outputs[0].sink == ToLogits(start=128, stop=288)


KINDS = ("single", "chunks", "per-layer", "per-block")
LAYOUTS = list(product(CONTRACTS, KINDS, ("c1t", "ct1"), ("static", "range")))


@pytest.mark.parametrize(("contract", "kind", "order", "shapes"), LAYOUTS)
def test_what_is_read_was_written(contract: str, kind: str, order: str, shapes: str) -> None:
    made = plan(
        {"num_hidden_layers": 3},
        tensor_layout=order,
        layout={"kind": kind},
        cache={"contract": contract, "context": 64},
        tokens={"shapes": shapes},
        head={"slices": 3},
    )
    for mode in made.modes.values():
        tensors: dict[str, tuple[int, ...]] = {}
        logits = []
        for step in mode.steps:
            shard = made.by_name[step.shard]
            function = made.functions[step.shard, step.function]
            caches = {i.source.name for i in function.inputs if isinstance(i.source, FromCache)}
            for item in function.inputs:
                if isinstance(item.source, FromTensor):
                    assert tensors[item.source.name] == item.shape
            for item in function.outputs:
                if isinstance(item.sink, ToTensor):
                    tensors[item.sink.name] = item.shape
                elif isinstance(item.sink, ToCache):
                    assert item.sink.name in caches
                else:
                    logits += range(item.sink.start, item.sink.stop)
            assert bool(function.states) == (contract == "stateful" and shard.kind != "head")
        assert logits == list(range(288))


@pytest.mark.parametrize(("contract", "kind", "order", "shapes"), LAYOUTS)
def test_modules_have_the_ports_of_their_plan(contract, kind, order, shapes) -> None:
    made = planner(
        tensor_layout=order,
        layout={"kind": kind},
        cache={"contract": contract, "context": 64},
        tokens={"shapes": shapes, "prefill": 8},
        head={"slices": 2},
    )
    assert_modules_fit(made)


@pytest.mark.parametrize(
    ("compression", "layer", "head", "mean"),
    [
        ({}, 2 * LAYER, 2 * 288 * 64, 16),
        # one fp16 scale for each row: 64 + 32 + 32 + 64 of attention, 96 + 96 + 64 of the mlp
        ({"default": "int8-per-channel"}, LAYER + 2 * 448, 288 * 64 + 2 * 288, 8),
        ({"default": "int8-per-tensor"}, LAYER + 2 * 7, 288 * 64 + 2, 8),
        # one palette of 16 fp16 values for each 32 rows: 14 of them a layer
        (
            {"default": "palette4-kmeans-group32"},
            LAYER // 2 + 14 * 16 * 2,
            288 * 64 // 2 + 9 * 16 * 2,
            4,
        ),
        (
            {"default": "palette6-uniform-per-tensor", "types": {"head": "fp16"}},
            LAYER * 6 // 8 + 7 * 64 * 2,
            2 * 288 * 64,
            (2 * LAYER * 6 + 288 * 64 * 16) / (2 * LAYER + 288 * 64),
        ),
        (
            {"types": {"mlp": "int8-per-tensor"}, "names": {"*.down_proj.weight": "fp16"}},
            2 * LAYER - 2 * 96 * 64 + 2 * 2,
            2 * 288 * 64,
            16 - 8 * (2 * 2 * 96 * 64) / (2 * LAYER + 288 * 64),
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["single", "chunks", "per-block"])
def test_bytes(kind: str, compression: dict[str, Any], layer: int, head: int, mean: float) -> None:
    made = plan(layout={"kind": kind}, compression=compression)
    sizes = [2 * GAINS + layer] * 2 + [2 * 64 + head]
    expected = [sum(sizes)] if kind == "single" else sizes
    assert [shard.weight_bytes for shard in made.shards] == expected
    assert made.weight_bytes == sum(sizes)
    assert made.mean_bits == pytest.approx(mean)
    assert made.embedding_bytes == 288 * 64 * 2


@pytest.mark.parametrize(
    ("rows", "nbytes"),
    [("fp16", 128), ("int8", 64 + 2), ("int4", 32 + 2 * 2), ("auto", 64 + 2)],
)
def test_bytes_of_the_embedding(rows: str, nbytes: int) -> None:
    assert plan(embedding={"format": rows}).embedding_bytes == 288 * nbytes


def test_biases_stay_in_fp16() -> None:
    compression = {"default": "int8-per-tensor"}
    plain, biased = (
        plan({"attention_bias": bias}, compression=compression) for bias in (False, True)
    )
    assert biased.weight_bytes - plain.weight_bytes == 2 * 2 * (64 + 32 + 32 + 64)


@pytest.mark.parametrize(("layers", "kv", "dim"), [(2, 2, 16), (3, 1, 16), (2, 4, 24)])
def test_kv_bytes(layers: int, kv: int, dim: int) -> None:
    config = {"num_hidden_layers": layers, "num_key_value_heads": kv, "head_dim": dim}
    found = plan(config | {"max_position_embeddings": 2048}, cache={"context": 96}).kv_bytes
    assert found == {
        context: layers * np.zeros((2, kv, dim, context), np.float16).nbytes
        for context in (96, 512, 1024, 2048)
    }


def test_summary() -> None:
    made = plan()
    assert (made.architecture, made.hidden, made.vocab, made.layers) == ("llama", 64, 288, 2)
    assert made.rotary == ("default",)


def test_windows_become_masks_of_their_own() -> None:
    config = {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1}
    checkpoint = UnreadCheckpoint(build_model("qwen2", **config))
    recipe = parse_recipe({"name": "test", "cache": {"context": 64}}, "test")
    shards = Planner(checkpoint, recipe).plan().by_name
    windows = {
        name: [
            (i.name, i.source.window) for i in shards[name].functions[0].inputs if "mask" in i.name
        ]
        for name in ("chunk-00", "chunk-01")
    }
    assert windows == {"chunk-00": [("mask", None)], "chunk-01": [("mask_window", 5)]}


@pytest.mark.parametrize(
    ("kind", "config", "why"),
    [
        ("llama", {}, "no layers of .* see only a window"),
        ("mistral", {"sliding_window": 5}, "all layers of .* share one kind of cache"),
    ],
)
def test_caches_of_no_window_have_no_contract_of_their_own(
    kind: str, config: dict[str, Any], why: str
) -> None:
    content = {"name": "test", "cache": {"context": 64, "sliding": "shift"}}
    checkpoint, recipe = (
        UnreadCheckpoint(build_model(kind, **config)),
        parse_recipe(content, "test"),
    )
    with pytest.raises(CetaneError, match=rf"cache\.sliding: {why}"):
        Planner(checkpoint, recipe)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"compression": {"types": {"experts": "fp16"}}},
            r"no weight is of type 'experts' \(the model has attention, head, mlp\)",
        ),
        (
            {"compression": {"names": {"model.layers.9.*": "fp16"}}},
            r"'model.layers.9.\*' matches no weight \(the closest names are model.layers",
        ),
        (
            {"compression": {"names": {"*norm*": "int8-per-tensor"}}},  # gains are not compressed
            r"'\*norm\*' matches no weight",
        ),
        (
            {"compression": {"types": {"mlp": "palette4-kmeans-group40"}}},
            r"mlp.gate_proj.weight has shape \(96, 64, 1, 1\): .*cannot divide its 96 output",
        ),
        (
            {"compression": {"types": {"head": "palette4-kmeans-group36"}}, "head": {"slices": 3}},
            r"lm_head.weight has shape \(96, 64, 1, 1\): .*groups of 36",
        ),
        ({"cache": {"context": 512}}, "a tiny llama was trained for 256 positions"),
        ({"head": {"slices": 300}}, "the head has only 288 rows"),
    ],
    ids=str,
)
def test_recipes_that_do_not_fit_the_model(content: dict[str, Any], message: str) -> None:
    with pytest.raises(CetaneError, match=message):
        plan(**content)


@pytest.mark.parametrize(("positions", "hint"), [(100, "--context 96"), (16, None)])
def test_a_context_beyond_the_models(positions: int, hint: str | None) -> None:
    """A context is a multiple of 32, so a model of fewer positions has none."""
    checkpoint = InMemoryCheckpoint(build_model("llama", max_position_embeddings=positions))
    with pytest.raises(CetaneError, match=f"was trained for {positions} positions") as caught:
        Planner(checkpoint, parse_recipe({"name": "test", "cache": {"context": 128}}, "test"))
    assert caught.value.hint == hint


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0,
            "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}  # fmt: skip
LATE = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1}


@pytest.mark.parametrize(
    ("kind", "rope", "said"),
    [
        ("phi3", LONGROPE, "has other rotary tables after 64 positions"),
        ("ministral3", LATE, "multiplies queries by a factor after 64 positions"),
    ],
)
def test_a_context_where_the_model_computes_otherwise(
    kind: str, rope: dict[str, Any], said: str
) -> None:
    """These models were trained for 256 positions."""
    first = {"original_max_position_embeddings": 64}
    config = {"rope_parameters": rope | first} | (first if kind == "phi3" else {})
    checkpoint = InMemoryCheckpoint(build_model(kind, **config))
    Planner(checkpoint, parse_recipe({"name": "test", "cache": {"context": 64}}, "test"))
    with pytest.raises(CetaneError, match=said) as caught:
        Planner(checkpoint, parse_recipe({"name": "test", "cache": {"context": 128}}, "test"))
    assert caught.value.hint == "--context 64"


@pytest.mark.parametrize("contract", CONTRACTS)
def test_json(contract: str) -> None:
    made = plan(cache={"contract": contract, "context": 128}, head={"slices": 2})
    text = json.dumps(made.model_dump(mode="json"))
    assert Plan.model_validate(json.loads(text)) == made
    for shard, planned in zip(json.loads(text)["shards"], made.shards, strict=True):
        assert shard["name"] == planned.name
        assert shard["kind"] == planned.kind
        assert shard["weight_bytes"] == planned.weight_bytes
        assert [f["name"] for f in shard["functions"]] == ["decode", "verify", "prefill"]


@pytest.mark.parametrize("path", [(), ("shards", 0), ("shards", 0, "functions", 0, "inputs", 0)])
def test_unknown_keys_in_a_plan_are_refused(path: tuple[Any, ...]) -> None:
    content = plan().model_dump(mode="json")
    place: Any = content
    for part in path:
        place = place[part]
    place["surprise"] = 1
    with pytest.raises(ValueError, match="surprise"):
        Plan.model_validate(content)


def test_more_layers_than_tensors_are_refused_before_any_is_made() -> None:
    checkpoint = UnreadCheckpoint(build_model("llama"))
    checkpoint.config = checkpoint.config | {"num_hidden_layers": 10**9}
    with pytest.raises(CetaneError, match="1000000000 layers, but there are only"):
        Planner(checkpoint, parse_recipe({"name": "test", "cache": {"context": 64}}, "test"))


@pytest.mark.parametrize(
    ("before", "after", "hint"),
    [
        ("lm_head.", None, 'write "tie_word_embeddings": true into config.json'),
        ("", "_orig_mod.", "_orig_mod.model.embed_tokens.weight is there"),
        ("model.", "language_model.", "language_model.embed_tokens.weight is there"),
        ("model.", "transformer.h.", "transformer.h.embed_tokens.weight is there"),
        ("model.embed_tokens.", "model.wte.", "weights and config.json are of one model"),
    ],
)
def test_a_missing_tensor_that_has_another_name(before: str, after: str | None, hint: str) -> None:
    """`before` stands in front of names, and gives way to `after`; None drops the tensor."""
    checkpoint = InMemoryCheckpoint(build_model("llama", tie_word_embeddings=False))
    checkpoint.tensors = {
        name if not name.startswith(before) else f"{after}{name.removeprefix(before)}": tensor
        for name, tensor in checkpoint.tensors.items()
        if after is not None or not name.startswith(before)
    }
    with pytest.raises(CetaneError, match="no tensor ") as caught:
        Planner(checkpoint, parse_recipe({"name": "test", "cache": {"context": 64}}, "test"))
    assert hint in str(caught.value.hint)
