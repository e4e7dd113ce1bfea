"""Epsilons, activations, bounds and rotary tables are read, and compared with the Hugging Face
model's. Roundings are compared with the plan's caches."""

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import pytest
import torch
from tests.conftest import InMemoryCheckpoint, build_model
from tests.families.gemma_models import build_gemma2, build_gemma3, build_gemma4
from tests.families.layer_normed_models import build_layer_normed
from tests.families.matrix_models import (
    DELTA_LAYERS,
    build_falcon,
    build_hybrid,
    build_mamba2,
    build_olmo_hybrid,
)
from tests.families.mixture_models import build_lfm2_moe, build_llama4, build_mixture, build_oss
from tests.families.zaya_models import build_zaya

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint
from cetane.families import SOFTPLUS_MOST, Model, RMSNorm, RotaryTable, delta, gemma
from cetane.families.attention import Attention
from cetane.families.gpt_oss import GptOssExperts
from cetane.families.grouped_query import LEAST_SCALE, STEPS, UNIT_SCALE, Rounded, at_least
from cetane.families.mamba2 import StateSpace
from cetane.families.matrices import Decays
from cetane.gates.authored import Authored
from cetane.gates.explain.graph import wrong_reading
from cetane.gates.port import bounds_in, packaged, tight
from cetane.gates.readings import Misread, bounding, judge_readings, misread, tighter
from cetane.gates.reference import Reference
from cetane.lower.lower import Lowering
from cetane.mil import load
from cetane.mil.index import FunctionIndex
from cetane.mil.program import Op
from cetane.planner import Planner
from cetane.schema.changes import override
from cetane.schema.recipe import parse_recipe

from .conftest import with_ops

Part = TypeVar("Part", bound=torch.nn.Module)
MODELS = {
    "llama": lambda: build_model("llama"),
    "gemma2": build_gemma2,
    "gemma3": build_gemma3,
    "gemma4": build_gemma4,
    "gpt_oss": build_oss,
    "olmoe": lambda: build_mixture("olmoe", num_experts=4, num_experts_per_tok=2, clip_qkv=8.0),
    "cohere": lambda: build_layer_normed("cohere"),
    "olmo": lambda: build_layer_normed("olmo", clip_qkv=0.5),
    "starcoder2": lambda: build_layer_normed("starcoder2"),
    "falcon": lambda: build_layer_normed("falcon"),
    "gptj": lambda: build_model("gptj", rotary_dim=8),
    "codegen": lambda: build_model("codegen", rotary_dim=8),
    "phimoe": lambda: build_mixture("phimoe", num_local_experts=3),
    "mamba2": lambda: build_mamba2(hidden_act="gelu", time_step_limit=(0.001, 50.0)),
    "llama4": lambda: build_llama4(attention_chunk_size=64, floor_scale=96),
    "lfm2_moe": lambda: build_lfm2_moe(layer_types=["conv", "full_attention"]),
    "lfm3": lambda: build_model("lfm3", layer_types=["conv", "sliding_attention"]),
    "granite_swa": lambda: build_model(
        "granite_swa", layer_types=["sliding_attention"] * 2, layer_rope_theta=[100.0, 1e4]
    ),
    "zaya": build_zaya,
    "granite_hybrid": lambda: build_hybrid(
        "dense", hidden_act="gelu", time_step_limit=(0.001, float("inf"))
    ),
    "falcon_h1": lambda: build_falcon(
        hidden_act="gelu", mamba_rms_norm=True, time_step_limit=(0.0, 50.0)
    ),
    "qwen3_5": lambda: build_mixture("qwen3_5_text", **DELTA_LAYERS, hidden_act="gelu"),
    "olmo_hybrid": lambda: build_olmo_hybrid(hidden_act="gelu"),
}


@pytest.fixture
def authored(request: pytest.FixtureRequest) -> Authored:
    checkpoint = InMemoryCheckpoint(MODELS[request.param]())
    recipe = parse_recipe({"name": "x", "cache": {"context": 64}}, "x")
    return Authored(Planner(checkpoint, recipe), checkpoint, Reference(checkpoint))  # type: ignore[arg-type]


@pytest.mark.parametrize("authored", list(MODELS), indirect=True)
def test_a_right_port_reads_as_the_model(authored: Authored) -> None:
    assert list(misread(authored, authored.reference)) == []


def test_programs_read_as_the_model(good: Bundle, checkpoint: Checkpoint) -> None:
    port = packaged(good, Planner(checkpoint, good.plan.recipe), checkpoint)
    assert list(misread(port, Reference(checkpoint))) == []
    (act, *_) = port.activations("chunk-00").values()
    x = torch.linspace(-5, 5, 101)
    torch.testing.assert_close(torch.from_numpy(act(x.numpy())), torch.nn.functional.silu(x))


def kinds(authored: Authored) -> list[str]:
    return [problem.kind for problem in misread(authored, authored.reference)]


@pytest.mark.parametrize("authored", ["gemma3", "starcoder2"], indirect=True)
def test_another_form_of_gelu(authored: Authored) -> None:
    """They are 5e-4 apart at most."""
    authored.planner.model.layers[1].mlp.act = torch.nn.functional.gelu  # type: ignore[union-attr]
    assert set(kinds(authored)) == {"activations"}


@pytest.mark.parametrize(
    "authored", ["zaya", "cohere", "llama4", "granite_swa", "gptj"], indirect=True
)
def test_another_rotary_base(authored: Authored) -> None:
    """Of a few pairs with a large base, the first positions are turned by next to nothing."""
    tables = authored.planner.model.rotary
    for name, table in list(tables.items()):
        tables[name] = RotaryTable(table.inverse_frequencies**1.1, table.scale)
    assert kinds(authored) == ["rotary tables"] * len(tables)


@pytest.mark.parametrize("authored", ["llama"], indirect=True)
def test_another_epsilon(authored: Authored) -> None:
    norm = next(m for m in authored.planner.model.layers[1].modules() if isinstance(m, RMSNorm))
    norm.eps *= 2
    assert set(kinds(authored)) == {"epsilons"}


@pytest.mark.parametrize(
    ("authored", "family"),
    [("gemma4", gemma), ("qwen3_5", delta), ("olmo_hybrid", delta)],
    indirect=["authored"],
)
def test_another_epsilon_without_a_module(
    authored: Authored, family: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function norms the values of Gemma 4, and the keys of the delta rule."""
    normalize = family.normalize

    def changed(x: torch.Tensor, size: int, eps: float, axis: int) -> torch.Tensor:
        made: torch.Tensor = normalize(x, size, 3 * eps, axis)
        return made

    monkeypatch.setattr(family, "normalize", changed)
    assert set(kinds(authored)) == {"epsilons"}


def parts(model: Model, kind: type[Part]) -> list[Part]:
    """The modules of a kind in a model's layers."""
    every = (part for layer in model.layers for part in layer.modules())
    return [part for part in every if isinstance(part, kind)]


def looser_experts(model: Model) -> None:
    for experts in parts(model, GptOssExperts):
        experts.limit *= 2


def unclipped(letters: str, model: Model) -> None:
    """Some of queries, keys and values have no bound."""
    for attention in parts(model, Attention):
        clipped = attention.project
        free = copy(attention)
        free.form = replace(attention.form, clip=None)
        attention.project = lambda x, letter, count, clipped=clipped, free=free: (  # type: ignore
            free.project if letter in letters else clipped
        )(x, letter, count)


def another_softcap(model: Model) -> None:
    for attention in parts(model, Attention):
        attention.heads = replace(attention.heads, softcap=3.0)


def one_more(bound: float, model: Model) -> None:
    """The model has none, and `minimum` bounds too."""
    act, most = torch.nn.functional.silu, partial(torch.full, (1,), bound)
    model.layers[1].mlp.act = lambda x: torch.minimum(act(x), most())  # type: ignore[union-attr]


def unbounded_steps(model: Model) -> None:
    for space in parts(model, StateSpace):
        space.bounds = (None, None)


@pytest.mark.parametrize(
    ("authored", "change", "says"),
    [
        ("granite_hybrid", unbounded_steps, ["lacks 0.001"]),
        ("falcon_h1", unbounded_steps, ["lacks 50"]),
        ("gpt_oss", looser_experts, ["has 14", "has -14", "lacks 7", "lacks -7"]),
        ("olmoe", partial(unclipped, "qkv"), ["lacks 8", "lacks -8"]),
        ("olmoe", partial(unclipped, "v"), ["lacks 8", "lacks -8"]),
        ("gemma2", another_softcap, ["has 3", "lacks 2"]),
        ("llama", partial(one_more, 20.0), ["has 20"]),
        ("llama", partial(one_more, SOFTPLUS_MOST), ["has 10"]),
    ],
    indirect=["authored"],
)
def test_another_bound(
    authored: Authored, change: Callable[[Model], None], says: list[str]
) -> None:
    """Random models reach none of these but the softcap."""
    change(authored.planner.model)
    found = list(misread(authored, authored.reference))
    assert {problem.kind for problem in found} == {"bounds"}
    words = {problem.problem.replace("a bound of ", "").partition(" ")[2] for problem in found}
    assert words == {f"{one} on activations" for one in says}


def exchanged(experts: GptOssExperts, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Gates have the bounds of ups, and ups those of gates."""
    gate = experts.gate_proj(x).clamp(-experts.limit, experts.limit)
    up = experts.up_proj(x).clamp(max=experts.limit)
    return answered(experts, gate, up + 1, weights)


def behind_one(experts: GptOssExperts, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """One is added to ups before their bounds."""
    gate = experts.gate_proj(x).clamp(max=experts.limit)
    up = (experts.up_proj(x) + 1).clamp(-experts.limit, experts.limit)
    return answered(experts, gate, up, weights)


def answered(
    experts: GptOssExperts, gate: torch.Tensor, up: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    inner = experts.weighted(up * gate * torch.sigmoid(gate * experts.alpha), weights)
    biases = experts.down_proj_bias(weights[:, experts.start : experts.stop])
    made: torch.Tensor = experts.down_proj(inner) + biases
    return made


def before_the_norm(attention: Attention, x: torch.Tensor, letter: str, count: int) -> torch.Tensor:
    """OLMoE bounds what its norms of queries and keys give."""
    bound = attention.form.clip
    assert bound is not None
    made = attention.get_submodule(f"{letter}_proj")(x).clamp(-bound, bound)
    norm = torch.nn.Identity() if letter == "v" else attention.get_submodule(f"{letter}_norm")
    return attention.heads.split(norm(made), count)


def values_alone(space: StateSpace, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Decays are of steps without bounds."""
    free = Decays.steps(space, x)
    return free.clamp(*space.bounds), free * space.A_log


@pytest.mark.parametrize(
    ("authored", "kind", "method", "wrong"),
    [
        ("granite_hybrid", StateSpace, "forward", values_alone),
        ("falcon_h1", StateSpace, "forward", values_alone),
        ("gpt_oss", GptOssExperts, "forward", exchanged),
        ("gpt_oss", GptOssExperts, "forward", behind_one),
        ("olmoe", Attention, "project", before_the_norm),
    ],
    indirect=["authored"],
)
def test_bounds_of_other_tensors(
    authored: Authored,
    kind: type,
    method: str,
    wrong: Callable[..., torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every function has the right numbers, and hardly a token reaches them."""
    monkeypatch.setattr(kind, method, wrong)
    found = list(misread(authored, authored.reference))
    assert {problem.kind for problem in found} == {"bounds"}
    assert all("they hold other tensors than the model's" in one.problem for one in found)


@pytest.mark.parametrize(
    "authored", ["gpt_oss", "olmoe", "gemma2", "granite_hybrid", "falcon_h1"], indirect=True
)
def test_programs_have_the_bounds_of_their_modules(authored: Authored, tmp_path: Path) -> None:
    """Conversion makes clips of clamps, and a factor of a softcap."""
    planner, shard = authored.planner, next(iter(authored.planner.members))
    Lowering(planner, authored.weights).lower(shard, tmp_path / "shard.mlpackage")
    for name, function in load(tmp_path / "shard.mlpackage").functions.items():
        own = bounding(bounds_in(FunctionIndex(function)))
        assert sorted(own) == sorted(bounding(authored.bounds(shard)[name])) != []
        others = tighter(authored.reference)
        tightened = bounding(bounds_in(FunctionIndex(tight(others, function))))
        assert tightened == bounding(others.get(bound, bound) for bound in own)


@pytest.mark.parametrize(("authored", "held"), [("zaya", "clip"), ("qwen3_5", "minimum")],
                         indirect=["authored"])  # fmt: skip
def test_bounds_without_effect(authored: Authored, held: str, tmp_path: Path) -> None:
    """Those of a choice among equal numbers, and of a softplus, are no bounds of activations. The
    same op elsewhere is one."""
    planner, shard = authored.planner, next(iter(authored.planner.members))
    assert not any(authored.bounds(shard).values())
    Lowering(planner, authored.weights).lower(shard, tmp_path / "shard.mlpackage")
    for function in load(tmp_path / "shard.mlpackage").functions.values():
        assert held in [op.kind for op in function.ops]
        assert list(bounds_in(FunctionIndex(function))) == []
        read = [
            replace(op, kind="identity") if op.kind in ("softplus", "sub") else op
            for op in function.ops
        ]
        elsewhere = replace(function, body=replace(function.body, ops=tuple(read)))
        assert list(bounds_in(FunctionIndex(elsewhere))) != []


def unrounded(op: Op) -> list[Op]:
    """Codes that are no whole numbers."""
    return [replace(op, kind="identity") if op.kind == "round" else op]


def read_before(op: Op) -> list[Op]:
    """Something else reads the keys and values before they are rounded."""
    (value,) = op.outputs
    other = replace(value, name=f"{value.name}_other")
    return [op, replace(op, kind="abs", outputs=(other,))] if op.kind == "round" else [op]


@pytest.mark.parametrize("wrong", [unrounded, read_before])
def test_keys_and_values_that_are_not_rounded(
    wrong: Callable[[Op], list[Op]],
    codes: Bundle,
    checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two layers round keys and values in each function. A port that does not passed: its decoding
    and its verifying had other bits."""
    planner, truth = Planner(checkpoint, codes.plan.recipe), Reference(checkpoint)
    bundled, modules = packaged(codes, planner, checkpoint), Authored(planner, checkpoint, truth)
    for port in (bundled, modules):
        assert port.roundings("model") == dict.fromkeys(codes.plan.modes, 4)
        assert list(misread(port, truth)) == []
    monkeypatch.setattr("cetane.gates.port.load", lambda path: with_ops(load(path), wrong))
    found = list(misread(bundled, truth))
    assert {one.problem for one in found} == {
        f"{mode} rounds 0 of 4 tensors of keys and values" for mode in codes.plan.modes
    }
    why = wrong_reading(found[0], modules)
    assert (why.cause, why.where) == ("conversion", "model")


def test_keys_and_values_that_are_rounded_coarsely(
    codes: Bundle, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only in calls of 4 tokens: the scales fit their codes, so no twin shows it."""

    def coarse(x: torch.Tensor) -> Rounded:
        step = UNIT_SCALE * (16 if x.shape[3] == 4 else 1)
        scales = at_least(x.abs().amax(2, keepdim=True) * step, LEAST_SCALE)
        return Rounded(torch.round(x / scales * STEPS), scales)

    monkeypatch.setattr("cetane.families.caches.rounded", coarse)
    recipe = override(codes.plan.recipe, {"tokens.verify": 4})
    authored = Authored(Planner(checkpoint, recipe), checkpoint, Reference(checkpoint))
    (found,) = misread(authored, authored.reference)
    assert (found.kind, found.shard) == ("roundings", "model")
    assert found.problem == "verify rounds keys and values to 8 steps, not to 127"


def test_what_was_misread_is_red() -> None:
    problem = Misread(kind="activations", shard="s", problem="x")
    assert [check.passed for check in judge_readings([problem])] == [
        True, False, True, True, True, True,
    ]  # fmt: skip
