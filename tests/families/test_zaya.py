"""ZAYA equals transformers in fp32 at every position, whatever the layout runs and in what pieces.

Its convolutions, its delayed value and its router state all reach over calls or shards: every model
is fed by prefill, in steps of one and of four tokens, and in uneven pieces.
"""

from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.conftest import InMemoryCheckpoint
from tests.families.parity import (
    CONTEXT,
    FEEDS,
    assert_close,
    assert_parity,
    cuts,
    engine_of,
    tokens,
    truth,
)
from tests.families.recipes import recipe
from tests.families.zaya_models import ALL, build_zaya, margin, scores
from transformers import DynamicCache

from cetane.errors import CetaneError
from cetane.families import author
from cetane.families.layers import ACTIVATIONS
from cetane.fitting.cache import extending
from cetane.planner import Planner
from cetane.schema.function import Route
from cetane.schema.slots import CONTRACTS

TIE = 5e-6
"""Scores that are nearer to each other than this may be ordered by rounding."""
KINDS = ("per-block", "per-layer", "chunks", "single")
ROUTED = ((), ("decode",), ("decode", "verify"), ALL)
ORDERS = ("c1t", "ct1")
RECIPES = [
    (contract, kind, ORDERS[(i + j // 2) % 2], ROUTED[(i + j) % len(ROUTED)])
    for (i, contract), (j, kind) in product(enumerate(CONTRACTS), enumerate(KINDS))
]
"""Contracts, kinds of layout, routing and orders of axes: any two choices meet. `test_anything`
draws all together."""


def windows(*kinds: int | None) -> dict[str, Any]:
    """Layers with these windows, None for full attention."""
    return {
        "num_hidden_layers": len(kinds),
        "layer_types": ["hybrid_sliding" if kind else "hybrid" for kind in kinds],
        "sliding_window": max((kind for kind in kinds if kind), default=None),
    }


def rope(theta: float, part: float, **others: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": part} | others


MODELS: dict[str, dict[str, Any]] = {
    "as is": {},
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    **{f"{kv} of 4 heads": {"num_key_value_heads": kv} for kv in (1, 2, 4)},
    "8 to 1": {"num_attention_heads": 8, "num_key_value_heads": 1},
    **{f"taps {a}, {b}": {"cca_time0": a, "cca_time1": b} for a, b in product((1, 2, 3), repeat=2)},
    "biases": {"attention_bias": True},
    "biases, 1 head": {"attention_bias": True, "num_key_value_heads": 1, "cca_time0": 3},
    **{f"{n} experts": {"num_experts": n} for n in (1, 2, 8)},
    **{f"router of {n}": {"router_hidden_size": n} for n in (2, 3, 40)},
    **{act: {"hidden_act": act} for act in ACTIVATIONS},
    "one layer": windows(None),
    **{f"window {w}": windows(w, None) for w in (1, 2, 31, 40)},
    "all windowed": windows(5, 5),
    "rotary": {
        "rope_parameters": {
            "hybrid": rope(1e4, 1.0, rope_type="linear", factor=3.0),
            "hybrid_sliding": rope(100.0, 0.25),
        }
    },
    "odd sizes": {"hidden_size": 27, "moe_intermediate_size": 7, "vocab_size": 53, "head_dim": 12},
    "eps": {"rms_norm_eps": 0.1},
}


def chosen(model: Any) -> set[int]:
    """The experts that some token chooses, the last of all being the skip."""
    return set(scores(model).argmax(-1).flatten().tolist())


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    model = build_zaya(**MODELS[name])
    experts = model.config.num_experts
    assert margin(model) > TIE
    assert experts in chosen(model)
    assert len(chosen(model)) >= min(3, experts + 1)
    contract, kind, order, routed = RECIPES[5 * list(MODELS).index(name) % len(RECIPES)]
    assert_parity(model, recipe(contract, kind, order, 3, routed), FEEDS)


@cache
def tiny() -> Any:
    return build_zaya()


@pytest.mark.parametrize(("contract", "kind", "order", "routed"), RECIPES)
def test_recipes(contract: str, kind: str, order: str, routed: tuple[str, ...]) -> None:
    feeds = {name: FEEDS[name] for name in ("prefill", "uneven")}
    assert_parity(tiny(), recipe(contract, kind, order, routed=routed), feeds)


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize(
    ("content", "feeds"),
    [
        ({"verify": None, "prefill": None, "routed": ["decode"]}, {"uneven": FEEDS["uneven"]}),
        ({"verify": 5, "prefill": 32, "routed": ["prefill"]}, FEEDS),
        ({"verify": 8, "prefill": 8, "routed": ["prefill", "verify"]}, FEEDS),
        ({"shapes": "range"}, FEEDS),
    ],
    ids=str,
)
def test_functions(contract: str, content: dict[str, Any], feeds: dict[str, list[int]]) -> None:
    assert_parity(tiny(), recipe(contract, **content), feeds)


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """A small config; all sizes, ratios and options at once."""
    kv, layers = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 3))
    kinds = draw(st.lists(st.sampled_from(["hybrid", "hybrid_sliding"]), min_size=layers,
                          max_size=layers))  # fmt: skip
    parts = st.sampled_from([0.5, 1.0])
    return {
        "num_hidden_layers": layers,
        "layer_types": kinds,
        "sliding_window": draw(st.integers(1, 40)),
        "num_attention_heads": kv * draw(st.sampled_from([1, 2, 4])),
        "num_key_value_heads": kv,
        "head_dim": draw(st.sampled_from([4, 8, 12, 16])),
        "hidden_size": draw(st.integers(20, 48)),
        "vocab_size": draw(st.integers(20, 120)),
        "cca_time0": draw(st.integers(1, 3)),
        "cca_time1": draw(st.integers(1, 3)),
        "attention_bias": draw(st.booleans()),
        "tie_word_embeddings": draw(st.booleans()),
        "num_experts": draw(st.integers(1, 8)),
        "moe_intermediate_size": draw(st.integers(1, 24)),
        "router_hidden_size": draw(st.integers(2, 24)),
        "hidden_act": draw(st.sampled_from(list(ACTIVATIONS))),
        "rope_parameters": {
            kind: rope(draw(st.sampled_from([100.0, 1e4, 5e6])), draw(parts))
            for kind in ("hybrid", "hybrid_sliding")
        },
    }


@st.composite
def recipes(draw: st.DrawFn) -> Any:
    widths = {"verify": draw(st.none() | st.integers(2, 6)),
              "prefill": draw(st.none() | st.integers(2, 32))}  # fmt: skip
    modes = ["decode", *(mode for mode, width in widths.items() if width)]
    return recipe(
        contract=draw(st.sampled_from(list(CONTRACTS))),
        kind=draw(st.sampled_from(KINDS)),
        order=draw(st.sampled_from(["c1t", "ct1"])),
        slices=draw(st.integers(1, 10)),
        routed=draw(st.sets(st.sampled_from(modes)).map(sorted)),
        **widths,
    )


@settings(max_examples=20, derandomize=True)
@given(configs(), recipes(), cuts)
def test_anything(config: dict[str, Any], recipe: Any, pieces: list[int]) -> None:
    model = build_zaya(**config)
    assume(margin(model) > TIE)
    assume(model.config.num_experts in chosen(model))
    assume(len(chosen(model)) >= min(3, model.config.num_experts + 1))
    assert_parity(model, recipe, {"pieces": pieces})


@pytest.mark.parametrize("routed", [(), ALL])
@pytest.mark.parametrize("config", [{}, {"cca_time0": 3, "attention_bias": True}], ids=str)
def test_transformers_own_cached_decoding(config: dict[str, Any], routed: tuple[str, ...]) -> None:
    """A second truth, with histories of its own: the caches of transformers, fed as ours are."""
    model = build_zaya(**config)
    ids = torch.tensor([tokens(model.config.vocab_size)])
    logits, kept = [], DynamicCache(config=model.config)
    with torch.inference_mode():
        for piece in ids.split([7, *[1] * (CONTEXT - 7)], dim=1):
            logits.append(model(piece, **extending(model, kept)).logits[0])
    engine = engine_of(model, recipe(routed=routed))
    assert_close(engine, torch.cat(logits).numpy(), {"cached": [7, *[1] * (CONTEXT - 7)]})


@pytest.mark.parametrize("kind", ["per-block", "single"])
@pytest.mark.parametrize("routed", ROUTED)
def test_a_skip_that_passes_the_hidden_state_on(kind: str, routed: tuple[str, ...]) -> None:
    """As vLLM, SGLang and MLX read the original: a token that chooses no expert keeps its normed
    hidden state times the probability."""
    model = build_zaya()
    without = truth(model)
    for layer in model.model.layers:
        layer.mlp.forward = skip_as_identity(layer.mlp)
    expected = truth(model)
    assert np.abs(expected - without).max() > 0.01
    made = recipe(kind=kind, routed=routed, family={"skip_expert": "identity"})
    assert_close(engine_of(model, made), expected, FEEDS)


def skip_as_identity(block: Any) -> Any:
    def forward(hidden: torch.Tensor, before: torch.Tensor | None) -> Any:
        logits, probability, index, state = block.gate(hidden, router_states=before)
        probabilities = torch.softmax(logits, -1)
        skips = (probabilities + block.gate.balancing_biases).argmax(
            -1
        ) == block.experts.num_experts
        flat = hidden.reshape(-1, hidden.shape[-1])
        mixed = block.experts(flat, index, probability)
        mixed = torch.where(skips[:, None], flat * probabilities[:, -1:], mixed)
        return mixed.reshape(hidden.shape), state

    return forward


@pytest.mark.parametrize(("one", "other"), [(0, 1), (1, 3), (0, 4), (3, 4)])
@pytest.mark.parametrize("routed", ROUTED)
def test_the_first_of_equals_is_chosen(one: int, other: int, routed: tuple[str, ...]) -> None:
    """Of equals, torch's topk gives any: transformers is told by a bias which one is meant."""
    model = build_zaya()
    for layer in model.model.layers:
        gate = layer.mlp.gate
        with torch.no_grad():  # logits of zero for both, and biases beyond those of the others
            gate.router_mlp.out_proj.weight[[one, other]] = 0
            gate.balancing_biases[[one, other]] = 2.0
    best = scores(model)
    assert torch.equal(best[..., one], best[..., other])
    assert bool((best[..., one] >= best.amax(-1)).all())
    engine = engine_of(model, recipe(routed=routed))
    for layer in model.model.layers:
        layer.mlp.gate.balancing_biases[other] -= 0.5
    assert_close(engine, truth(model), {name: FEEDS[name] for name in ("prefill", "steps")})
    for layer in model.model.layers:
        layer.mlp.gate.balancing_biases[other] += 1
    assert np.abs(truth(model) - truth(model)).max() == 0
    with pytest.raises(AssertionError, match="prefill"):
        assert_close(engine, truth(model), {"prefill": FEEDS["prefill"]})


@pytest.mark.parametrize("routed", [(), ALL])
def test_what_blocks_hand_on(routed: tuple[str, ...]) -> None:
    """Hidden and router states are those of the modules which every block names as its truth."""
    model = tiny()
    expected: dict[str, dict[str, np.ndarray]] = {}
    planner = Planner(InMemoryCheckpoint(model), recipe(routed=routed))

    def hook(block: str, name: str, index: int) -> Any:
        def keep(module: Any, args: Any, out: Any) -> None:
            found = out[index] if isinstance(out, tuple) else out
            expected.setdefault(block, {})[name] = found.reshape(CONTEXT, -1).T.numpy()

        return keep

    hooks = [
        model.get_submodule(path).register_forward_hook(hook(block.name, name, index))
        for block in planner.model.layers
        for name, (path, index) in block.truths().items()
    ]
    truth(model)
    for each in hooks:
        each.remove()
    found: dict[tuple[str, str], list[np.ndarray]] = {}

    def watch(step: Any, name: str, value: np.ndarray, valid: int) -> None:
        rows = found.setdefault((step.shard, name.removesuffix("_out")), [])
        rows.append(value.reshape(value.shape[1], -1)[:, :valid])

    engine_of(model, recipe(routed=routed)).session(watch=[watch]).feed(
        tokens(model.config.vocab_size)[:27], "none"
    )
    assert list(expected) == [block.name for block in planner.model.layers]
    for block, tensors in expected.items():
        assert tensors.keys() == ({"hidden", "router"} if "moe" in block else {"hidden"})
        for name, whole in tensors.items():
            if (block, name) != ("moe-02", "router"):  # nothing reads the last one
                parts = np.concatenate(found[block, name], 1)
                assert np.abs(parts - whole[:, :27]).max() <= 1e-4, (block, name)


@pytest.mark.parametrize(
    "wrong",
    [
        {"cca_time0": 1},
        {"sliding_window": 8},
        {"layer_types": ["hybrid"] * 3},
        {"rms_norm_eps": 0.1},
        {"hidden_act": "gelu"},
        {"rope_parameters": {k: rope(1e4, 0.5) for k in ("hybrid", "hybrid_sliding")}},
        {"tie_word_embeddings": False},
    ],
    ids=str,
)
def test_parity_sees_an_option_that_is_not_ported(wrong: dict[str, Any]) -> None:
    model = build_zaya(cca_time0=1) if "cca_time0" in wrong else tiny()
    if "cca_time0" in wrong:
        wrong = {}
        model.model.layers[0].self_attn.qkv_proj.conv_qk_depthwise.bias.data += 1
    with pytest.raises((AssertionError, CetaneError)):
        engine = engine_of(tiny(), recipe(), tiny().config.to_dict() | wrong)
        assert_close(engine, truth(model), {"prefill": FEEDS["prefill"]})


def test_every_weight_is_read_once() -> None:
    """No tensor of the checkpoint is left out, none read twice, but for the tied table."""
    model = build_zaya(attention_bias=True)
    checkpoint = InMemoryCheckpoint(model)
    planner = Planner(checkpoint, recipe(slices=2))
    table = planner.model.embedding
    names = [table.weight, table.bias, table.scale]
    rows: dict[str, int] = {}
    taps: dict[str, list[torch.Tensor]] = {}
    for block in (*planner.model.layers, *planner.heads):
        for path, weight in block.weights():
            if ".tap_" in path:
                taps.setdefault(weight.name, []).append(weight.read(checkpoint).reshape(-1))
            elif weight.rows:
                rows[weight.name] = rows.get(weight.name, 0) + weight.rows[1] - weight.rows[0]
            elif weight.name != planner.model.norm:
                names.append(weight.name)
    assert len(names) == len(set(names))
    assert set(names) | set(rows) | set(taps) | {planner.model.norm} == set(checkpoint.tensors)
    for name, columns in taps.items():
        stored = checkpoint.tensors[name]
        assert torch.equal(torch.stack(columns, 1).reshape(stored.shape), stored)
    assert rows == {name: checkpoint.shape(name)[0] for name in rows}


def test_kinds_of_weights() -> None:
    model = author(build_zaya(attention_bias=True).config.to_dict(), "c1t", {}, None)
    kinds: dict[str | None, set[str]] = {}
    for block in model.layers[2:4]:
        for _, weight in block.weights():
            name = weight.name.removeprefix("model.layers.1.")
            kinds.setdefault(weight.kind, set()).add(name.removesuffix(".weight"))
    projections = {f"self_attn.qkv_proj.{p}" for p in
                   ("q_proj", "k_proj", "v_proj_current", "v_proj_delayed")}  # fmt: skip
    mlp = {f"mlp.gate.router_mlp.{part}" for part in ("fc1", "fc2")}
    residuals = {
        f"post_{where}_residual_scale.{side}_{what}"
        for where, side, what in product(
            ("attention", "mlp"), ("hidden_states", "residual"), ("scale", "bias")
        )
    }
    assert kinds.pop("attention") == projections | {"self_attn.o_proj"}
    assert kinds.pop("convolution") == {"self_attn.qkv_proj.conv_qk_grouped"}
    assert kinds.pop("router") == mlp | {"mlp.gate.down_proj"}
    assert kinds.pop("experts") == {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    small = {"mlp.gate.router_mlp.out_proj", "self_attn.qkv_proj.conv_qk_depthwise"}
    assert residuals | small < kinds.pop(None)
    assert not kinds


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lm_head_bias": True}, "config.json of a zaya model: lm_head_bias"),
        ({"num_experts": 0}, "num_experts = 0"),
        ({"num_experts": -2}, "num_experts = -2"),
        ({"cca_time0": 0}, "cca_time0 = 0"),
        ({"cca_time1": -1}, "cca_time1 = -1"),
        ({"router_hidden_size": 0}, "router_hidden_size = 0"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size = 0"),
        ({"num_experts_per_tok": 2}, "num_experts_per_tok"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"layer_types": ["hybrid"] * 2}, "layer_types"),
        ({"layer_types": ["hybrid", "hybrid", "other"]}, "other"),
        ({"layer_types": ["hybrid", "hybrid", "full_attention"]}, "full_attention"),
        ({"sliding_window": None}, "sliding_window"),
        ({"sliding_window": 0}, "sliding_window = 0"),
        ({"head_dim": 6}, "of 6 channels"),
        ({"head_dim": 5, "num_key_value_heads": 1, "rope_parameters": {
            kind: rope(1e4, 0.8) for kind in ("hybrid", "hybrid_sliding")}}, "head_dim = 5"),
        ({"rope_parameters": {"hybrid": rope(1e4, 0.5)}}, "hybrid_sliding"),
        ({"rope_parameters": {}}, "rope_parameters"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"hidden_act": "mish"}, "mish"),
    ],
    ids=str,
)  # fmt: skip
def test_invalid_configs(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CetaneError) as error:
        author(tiny().config.to_dict() | change, "c1t", {}, None)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_only_the_routed_modes_route() -> None:
    plan = engine_of(tiny(), recipe(routed=["decode", "verify"])).plan
    routes = {
        mode: [step for step in made.steps if isinstance(step, Route)]
        for mode, made in plan.modes.items()
    }
    assert {mode: len(found) for mode, found in routes.items()} == {
        "decode": 3,
        "verify": 3,
        "prefill": 0,
    }
    assert routes["decode"] == routes["verify"]
    assert routes["decode"][0].experts[2] == ("expert-02-decode", "expert-02-verify")
