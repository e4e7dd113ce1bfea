"""Epsilons, activations and rotary tables are read, and compared with the Hugging Face model's.
Roundings are compared with the plan's caches."""

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from tests.conftest import InMemoryCheckpoint, build_model
from tests.families.gemma_models import build_gemma3, build_gemma4
from tests.families.test_mixtral import build
from tests.families.test_qwen3_next import LAYERS
from tests.families.zaya_models import build_zaya

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint
from cetane.families import RMSNorm, RotaryTable, delta, gemma4
from cetane.gates.authored import Authored
from cetane.gates.explain.graph import wrong_reading
from cetane.gates.port import packaged
from cetane.gates.readings import Misread, judge_readings, misread
from cetane.gates.reference import Reference
from cetane.mil import load
from cetane.mil.program import Op
from cetane.planner import Planner
from cetane.schema.recipe import parse_recipe

from .conftest import with_ops

MODELS = {
    "llama": lambda: build_model("llama"),
    "gemma3": build_gemma3,
    "gemma4": build_gemma4,
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
    assert [check.passed for check in judge_readings([problem])] == [True, False, True, True]
