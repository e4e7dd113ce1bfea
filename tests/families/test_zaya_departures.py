"""Each departure is what the published port does, written once more as a patch of transformers'.

Truth is transformers' model, changed in one place from what is said of the port: its converter, its
validator and its experiment pages.
"""

from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.conftest import InMemoryCheckpoint, build_model
from tests.families.parity import FEEDS, assert_close, engine_of, run, truth
from tests.families.recipes import recipe
from tests.families.zaya_models import ALL, build_zaya
from torch import nn

from cetane.checkpoint import open_checkpoint
from cetane.errors import CetaneError
from cetane.families import chosen_departures
from cetane.families.zaya_departures import DEPARTURES
from cetane.lower.lower import Lowering
from cetane.mil import load
from cetane.planner import Planner
from cetane.schema.recipe import load_recipe, parse_recipe
from cetane.schema.slots import CONTRACTS


def model_of(**config: Any) -> Any:
    """A tiny model of whose depthwise convolutions two have a bias beyond 5."""
    model = build_zaya(**config)
    first, second, third = (layer.self_attn.qkv_proj for layer in model.model.layers)
    with torch.no_grad():
        first.conv_qk_depthwise.bias[0] = 35.0
        second.conv_qk_depthwise.bias[5] = 4.9
        second.conv_qk_grouped.bias[3] = -6.0  # of no matter
        third.conv_qk_depthwise.bias[3] = -5.5
    return model


Patch = Callable[[Any], None]
PATCHES: dict[str, Patch] = {}


def patch(name: str) -> Callable[[Patch], Patch]:
    """Registers what a departure does to transformers' model."""

    def register(change: Patch) -> Patch:
        PATCHES[name] = change
        return change

    return register


def qkv(model: Any, change: Callable[[Any, torch.Tensor, Any], Any]) -> None:
    """Replaces queries, keys and values `(1, T, heads, D)` of all layers: `change(cca, x, old)`."""
    for layer in model.model.layers:
        cca = layer.self_attn.qkv_proj
        cca.forward = lambda x, *_, cca=cca, old=cca.forward: change(cca, x, old(x, None))


def heads(cca: Any, x: torch.Tensor) -> torch.Tensor:
    return x.reshape(*x.shape[:-1], -1, cca.head_dim)


def stream(cca: Any, x: torch.Tensor) -> torch.Tensor:
    """Queries and keys as projected, `(1, T, heads, D)`."""
    return heads(cca, torch.cat([cca.q_proj(x), cca.k_proj(x)], -1))


def means(cca: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The residual paths of CCA, head by head."""
    q, k = stream(cca, x).split([cca.num_attention_heads, cca.num_key_value_heads], 2)
    group = cca.num_key_value_groups
    mixed = [(q[:, :, h] + k[:, :, h // group]) / 2 for h in range(cca.num_attention_heads)]
    per_key = [
        torch.stack(mixed[n * group : (n + 1) * group]).mean(0)
        for n in range(cca.num_key_value_heads)
    ]
    return torch.stack(mixed, 2), torch.stack(per_key, 2)


@patch("query-to-output")
def query_to_output(model: Any) -> None:
    for layer in model.model.layers:
        attn = layer.self_attn
        attn.forward = lambda hidden_states, attn=attn, **_: (
            attn.o_proj(attn.qkv_proj.q_proj(hidden_states)),
            None,
        )


@patch("no-convolution")
def no_convolution(model: Any) -> None:
    qkv(model, lambda cca, x, old: (*means(cca, x), old[2]))


@patch("current-tap")
def current_tap(model: Any) -> None:
    def change(cca: Any, x: torch.Tensor, old: Any) -> Any:
        q, k = means(cca, x)
        first, second = cca.conv_qk_depthwise, cca.conv_qk_grouped
        tapped = stream(cca, x).flatten(2) * first.weight[:, 0, -1] + first.bias
        taps = second.weight[..., -1].reshape(-1, cca.head_dim, cca.head_dim)
        mixed = torch.einsum("bthd,hed->bthe", heads(cca, tapped), taps)
        mixed = mixed + heads(cca, second.bias)
        return (
            mixed[:, :, : cca.num_attention_heads] + q,
            mixed[:, :, cca.num_attention_heads :] + k,
            old[2],
        )

    qkv(model, change)


@patch("skip-large-bias")
def skip_large_bias(model: Any) -> None:
    def change(cca: Any, x: torch.Tensor, old: Any) -> Any:
        kept = cca is model.model.layers[1].self_attn.qkv_proj
        return old if kept else (*means(cca, x), old[2])

    qkv(model, change)


@patch("no-means")
def no_means(model: Any) -> None:
    def change(cca: Any, x: torch.Tensor, old: Any) -> Any:
        raw = stream(cca, x)
        q, k = means(cca, x)
        return (
            old[0] - q + raw[:, :, : cca.num_attention_heads],
            old[1] - k + raw[:, :, cca.num_attention_heads :],
            old[2],
        )

    qkv(model, change)


@patch("no-qk-norm")
def no_qk_norm(model: Any) -> None:
    for layer in model.model.layers:
        norm = layer.self_attn.qk_norm
        norm.forward = lambda q, k, norm=norm: (q, k * norm.temp[:, None])


@patch("first-temperature")
def first_temperature(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.qk_norm.temp.data.fill_(layer.self_attn.qk_norm.temp[0])


@patch("undelayed-value")
def undelayed_value(model: Any) -> None:
    qkv(
        model,
        lambda cca, x, old: (
            *old[:2],
            heads(cca, torch.cat([cca.v_proj_current(x), cca.v_proj_delayed(x)], -1)),
        ),
    )


@patch("silu-router")
def silu_router(model: Any) -> None:
    for layer in model.model.layers:
        mlp = layer.mlp.gate.router_mlp
        mlp.act_fn = nn.SiLU()
        mlp.norm = nn.Sequential(nn.SiLU(), mlp.norm)


@patch("no-router-state")
def no_router_state(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.gate.use_eda = False


def weigh(model: Any, weights: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    """Replaces the mixtures by sums of all experts: `weights(gate, logits)` are `(T, E)`."""
    for layer in model.model.layers:

        def forward(x: torch.Tensor, before: Any, block: Any = layer.mlp) -> Any:
            logits, _, _, state = block.gate(x, router_states=before)
            weight, flat = weights(block.gate, logits), x[0]
            mixed = torch.zeros_like(flat)
            for index in range(block.experts.num_experts):
                gate, up = (flat @ block.experts.gate_up_proj[index].T).chunk(2, -1)
                expert = (block.experts.act_fn(gate) * up) @ block.experts.down_proj[index].T
                mixed = mixed + weight[:, index, None] * expert
            return mixed[None], state

        layer.mlp.forward = forward


@patch("bias-on-logits")
def bias_on_logits(model: Any) -> None:
    def weights(gate: Any, logits: torch.Tensor) -> torch.Tensor:
        probabilities = torch.softmax(logits + gate.balancing_biases, -1)
        best = probabilities.argmax(-1, keepdim=True)
        return torch.zeros_like(probabilities).scatter(-1, best, probabilities.gather(-1, best))

    weigh(model, weights)


@patch("soft-routing")
def soft_routing(model: Any) -> None:
    weigh(model, lambda gate, logits: torch.softmax(logits, -1))


@patch("raw-embedding")
def raw_embedding(model: Any) -> None:
    model.model.input_hidden_states_scale.data.fill_(1)
    model.model.input_hidden_states_bias.data.fill_(0)


def merges(model: Any) -> list[Any]:
    """The two merges of every layer, in order."""
    return [
        merge
        for layer in model.model.layers
        for merge in (layer.post_attention_residual_scale, layer.post_mlp_residual_scale)
    ]


@patch("residual-order")
def residual_order(model: Any) -> None:
    for merge in merges(model):
        merge.forward = lambda h, r, m=merge: (
            h * m.hidden_states_scale
            + m.hidden_states_bias
            + r * m.residual_scale
            + m.residual_bias
        )


@patch("neighbours-gates")
def neighbours_gates(model: Any) -> None:
    """Every merge has the gates of the one before; the first has the embedding's."""
    sides = ("hidden_states_scale", "hidden_states_bias", "residual_scale", "residual_bias")
    values = [[getattr(merge, side).data.clone() for side in sides] for merge in merges(model)]
    one, zero = torch.ones_like(values[0][0]), torch.zeros_like(values[0][0])
    inner = model.model
    given = [inner.input_hidden_states_scale.data, inner.input_hidden_states_bias.data, one, zero]
    for merge, own in zip(merges(model), [given, *values[:-1]], strict=True):
        for side, value in zip(sides, own, strict=True):
            getattr(merge, side).data.copy_(value)


@patch("unscaled-residual")
def unscaled_residual(model: Any) -> None:
    for layer in model.model.layers:
        layer.post_attention_residual_scale.residual_scale.data.fill_(1)
        layer.post_attention_residual_scale.residual_bias.data.fill_(0)


MODEL = model_of()


def departing(*names: str, **content: Any) -> Any:
    return recipe(family={"departures": list(names)}, **content)


def test_every_departure_is_tested() -> None:
    assert set(PATCHES) == set(DEPARTURES)


CONFIGS: tuple[dict[str, Any], ...] = (
    {},
    {"cca_time0": 1, "cca_time1": 3, "num_key_value_heads": 4, "attention_bias": True},
)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("name", PATCHES)
def test_a_departure_alone(name: str, config: dict[str, Any]) -> None:
    model = model_of(**config)
    faithful, engine = truth(model), engine_of(model, departing(name, kind="chunks"))
    PATCHES[name](model)
    expected = truth(model)
    assert np.abs(expected - faithful).max() > 1e-2
    assert_close(engine, expected, FEEDS)


@pytest.mark.parametrize("name", sorted(set(PATCHES) - {"soft-routing"}))
@pytest.mark.parametrize("order", ["c1t", "ct1"])
def test_a_departure_with_routed_experts(name: str, order: str) -> None:
    model = model_of()
    engine = engine_of(model, departing(name, routed=ALL, order=order))
    PATCHES[name](model)
    assert_close(engine, truth(model), {"uneven": FEEDS["uneven"]})


PORT = tuple(name for name in DEPARTURES if name not in ("query-to-output", "no-convolution"))
"""The last version of the port: everything but what it had outgrown."""


def test_the_port_as_a_whole() -> None:
    """Several at once are each of them: patched in the order in which they build on each other."""
    model = model_of()
    engine = engine_of(model, departing(*PORT))
    order = ["current-tap", "skip-large-bias", "no-means", "undelayed-value", "first-temperature",
             "no-qk-norm", "silu-router", "no-router-state", "neighbours-gates", "raw-embedding",
             "unscaled-residual", "residual-order"]  # fmt: skip
    assert {*order, "bias-on-logits", "soft-routing"} == set(PORT)
    for name in order:
        PATCHES[name](model)
    weigh(model, lambda gate, logits: torch.softmax(logits + gate.balancing_biases, -1))
    assert_close(engine, truth(model), FEEDS)


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("kind", ["per-block", "single"])
def test_all_at_once(contract: str, kind: str) -> None:
    """Those that another leaves nothing to change do nothing; every feed gives the same."""
    model = model_of()
    engine = engine_of(model, departing(*DEPARTURES, contract=contract, kind=kind))
    once = run(engine, FEEDS["prefill"])
    assert np.abs(once - truth(model)).max() > 0.1
    assert_close(engine, once, FEEDS)


@pytest.mark.parametrize(("one", "other"), combinations(DEPARTURES, 2))
def test_any_two(one: str, other: str) -> None:
    """The order in which a recipe names them is of no matter, and they do not hinder each other."""
    asked = chosen_departures("zaya", {"departures": [other, one]})
    assert asked == [DEPARTURES[one], DEPARTURES[other]]
    engine = engine_of(MODEL, departing(other, one))
    found = run(engine, [9, 1, 4])  # a call of every width, and one after
    assert np.isfinite(found).all()


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ({"departures": ["no-qk-nrm"]}, "family.departures.0: no departure 'no-qk-nrm'; known: "),
        ({"departures": ["no-means", "x"]}, "family.departures.1: no departure 'x'; known: "),
        ({"departures": [7]}, "family.departures.0: no departure 7; known: query-to-output, "),
        ({"departures": "no-means"}, "family.departures: 'no-means' is not a list of names"),
        (
            {"departure": ["no-means"]},
            "the [family] options of a zaya model: departure: unknown key",
        ),
        ({"skip_expert": "one"}, "the [family] options of a zaya model: skip_expert: "),
    ],
    ids=str,
)
def test_options_that_are_refused(family: dict[str, Any], message: str) -> None:
    checkpoint = InMemoryCheckpoint(MODEL)
    with pytest.raises(CetaneError) as error:
        Planner(checkpoint, recipe(family=family))
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_a_departure_that_is_named_twice_is_applied_once() -> None:
    once, twice = (run(engine_of(MODEL, departing(*["no-means"] * n)), [32]) for n in (1, 2))
    assert np.array_equal(once, twice)


def test_a_llama_has_no_departures() -> None:
    checkpoint = InMemoryCheckpoint(build_model("llama"))
    with pytest.raises(CetaneError, match="of a llama model: departures: unknown key"):
        Planner(checkpoint, departing("no-means"))


def test_routing_needs_one_expert_a_token() -> None:
    with pytest.raises(
        CetaneError, match=r"layout.routed: the options in .family. mix the outputs"
    ):
        Planner(InMemoryCheckpoint(MODEL), departing("soft-routing", routed=["decode"]))


def test_routing_needs_experts() -> None:
    checkpoint = InMemoryCheckpoint(build_model("llama"))
    with pytest.raises(CetaneError, match=r"layout.routed: a tiny llama has no experts"):
        Planner(checkpoint, recipe(routed=["decode"]))


def test_biases_are_read_from_files(tmp_path: Path) -> None:
    """The one departure that reads weights while planning."""
    MODEL.save_pretrained(tmp_path)
    expected = Planner(InMemoryCheckpoint(MODEL), departing("skip-large-bias")).plan()
    found = Planner(open_checkpoint(tmp_path), departing("skip-large-bias")).plan()
    assert found.shards == expected.shards
    assert len({shard.functions for shard in found.shards}) > 3

    file = tmp_path / "model.safetensors"
    name = "model.layers.1.self_attn.qkv_proj.conv_qk_depthwise.bias"
    save_file({n: x for n, x in load_file(file).items() if n != name}, file)
    with pytest.raises(CetaneError, match=f"no tensor '?{name}"):
        Planner(open_checkpoint(tmp_path), departing("skip-large-bias"))


def test_what_departures_leave_out() -> None:
    """Nothing is kept between calls that a departure has no use for."""
    keeps = {
        name: Planner(InMemoryCheckpoint(MODEL), departing(name)).model.layers[0].keeps
        for name in DEPARTURES
    }
    usual = ("kv", "delayed", "conv")
    changed = {name: kept for name, kept in keeps.items() if kept != usual}
    assert changed == {
        "query-to-output": (),
        "no-convolution": ("kv", "delayed"),
        "current-tap": ("kv", "delayed"),
        "skip-large-bias": ("kv", "delayed"),
        "undelayed-value": ("kv", "conv"),
    }


@pytest.mark.parametrize("names", [("soft-routing",), ("bias-on-logits", "soft-routing")])
def test_soft_routing_is_lowered(names: tuple[str, ...], tmp_path: Path) -> None:
    """A weight that no op reads cannot be in a program: without a choice there are no biases,
    unless they are on the logits."""
    checkpoint = InMemoryCheckpoint(MODEL)
    planner = Planner(checkpoint, departing(*names))
    Lowering(planner, checkpoint).lower("moe-00", tmp_path / "moe.mlpackage")
    function = load(tmp_path / "moe.mlpackage").functions["decode"]
    kinds = [op.kind for op in function.ops]
    assert "softmax" in kinds
    assert "reduce_argmax" not in kinds


PUBLISHED = ("zaya-exp29-probe", "zaya-exp30", "zaya-exp31", "zaya-exp34", "zaya-exp35")


@pytest.mark.parametrize("name", PUBLISHED)
def test_recipes_of_the_published_port_are_found_by_name(name: str) -> None:
    """Their departures come from the lab, whoever makes the plan."""
    wanted = load_recipe(name)
    options = {"layout": wanted.layout.model_dump(), "family": wanted.family}
    small = parse_recipe({"name": name, "cache": {"context": 64}} | options, name)
    made = Planner(InMemoryCheckpoint(MODEL), small).plan()
    assert made.recipe.family["departures"] == wanted.family["departures"]
