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
from tests.families.test_gpt_oss import build_oss
from tests.families.test_lfm2 import build_lfm2_moe
from tests.families.test_mixtral import build
from tests.families.test_qwen3_next import LAYERS
from tests.families.zaya_models import build_zaya

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint
from cetane.families import Model, RMSNorm, RotaryTable, delta, gemma4
from cetane.families.attention import Attention
from cetane.families.gpt_oss import GptOssExperts
from cetane.gates.authored import Authored
from cetane.gates.explain.graph import wrong_reading
from cetane.gates.port import bounds_in, packaged
from cetane.gates.readings import Misread, bounding, judge_readings, misread
from cetane.gates.reference import Reference
from cetane.lower.lower import Lowering
from cetane.mil import load
from cetane.mil.index import FunctionIndex
from cetane.mil.program import Op
from cetane.planner import Planner
from cetane.schema.recipe import parse_recipe

from .conftest import with_ops

Part = TypeVar("Part", bound=torch.nn.Module)
MODELS = {
    "llama": lambda: build_model("llama"),
    "gemma2": build_gemma2,
    "gemma3": build_gemma3,
    "gemma4": build_gemma4,
    "gpt_oss": build_oss,
    "olmoe": lambda: build("olmoe", num_experts=4, num_experts_per_tok=2, clip_qkv=8.0),
    "lfm2_moe": lambda: build_lfm2_moe(layer_types=["conv", "full_attention"]),
    "zaya": build_zaya,
    "qwen3_5": lambda: build("qwen3_5_text", **LAYERS, hidden_act="gelu"),
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


@pytest.mark.parametrize("authored", ["gemma3"], indirect=True)
def test_another_form_of_gelu(authored: Authored) -> None:
    """They are 5e-4 apart at most."""
    authored.planner.model.layers[1].mlp.act = torch.nn.functional.gelu  # type: ignore[union-attr]
    assert set(kinds(authored)) == {"activations"}


@pytest.mark.parametrize("authored", ["zaya"], indirect=True)
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
    ("authored", "family"), [("gemma4", gemma4), ("qwen3_5", delta)], indirect=["authored"]
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


def one_more(model: Model) -> None:
    """The model has none, and `minimum` bounds too."""
    act, most = torch.nn.functional.silu, partial(torch.full, (1,), 20.0)
    model.layers[1].mlp.act = lambda x: torch.minimum(act(x), most())  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("authored", "change", "says"),
    [
        ("gpt_oss", looser_experts, ["has 14", "has -14", "lacks 7", "lacks -7"]),
        ("olmoe", partial(unclipped, "qkv"), ["lacks 8", "lacks -8"]),
        ("olmoe", partial(unclipped, "v"), ["lacks 8", "lacks -8"]),
        ("gemma2", another_softcap, ["has 3", "lacks 2"]),
        ("llama", one_more, ["has 20"]),
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


@pytest.mark.parametrize("authored", ["gpt_oss", "olmoe", "gemma2"], indirect=True)
def test_programs_have_the_bounds_of_their_modules(authored: Authored, tmp_path: Path) -> None:
    """Conversion makes clips of clamps, and a factor of a softcap."""
    planner, shard = authored.planner, next(iter(authored.planner.members))
    Lowering(planner, authored.weights).lower(shard, tmp_path / "shard.mlpackage")
    for name, function in load(tmp_path / "shard.mlpackage").functions.items():
        own = bounding(bounds_in(FunctionIndex(function)))
        assert sorted(own) == sorted(bounding(authored.bounds(shard)[name])) != []


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


def test_what_was_misread_is_red() -> None:
    problem = Misread(kind="activations", shard="s", problem="x")
    assert [check.passed for check in judge_readings([problem])] == [True, False, True, True, True]
