"""Layouts for a chip: what it is known to hold, by figures with sources."""

import re
from types import SimpleNamespace

import pytest
from tests.conftest import UnreadCheckpoint, build_model

from cetane.errors import CetaneError
from cetane.gates.residency.audit import audit
from cetane.gates.residency.sketch import sketch
from cetane.gates.residency.target import Target
from cetane.hardware.chips import find_chip
from cetane.lab import synthetic
from cetane.mil.program import TensorType
from cetane.mil.validate import _check_sizes
from cetane.perf.combinations import Combinations
from cetane.pipeline import chip_layout
from cetane.pipeline.chip_layout import recipe_for_chip
from cetane.pipeline.plan import forecast
from cetane.planner import Planner
from cetane.schema.changes import override
from cetane.schema.recipe import load_recipe


@pytest.fixture(scope="module")
def e2b() -> Planner:
    """Gemma 4 E2B: 1.4 GB of layers in 6 bits, and a head of 262,144 rows."""
    return Planner(synthetic.Shapes("gemma4-e2b"), load_recipe("default"))


@pytest.mark.parametrize(
    ("chip", "chunks", "slices"),
    [("a19-pro", 4, 4), ("m4-pro", 2, 4), ("m4-max", 1, 4), ("m1", 2, 16)],
)
def test_programs_are_what_the_chip_holds(
    chip: str, chunks: int, slices: int, e2b: Planner
) -> None:
    fitted = recipe_for_chip(e2b, Target(chip))
    plan = Planner(e2b.checkpoint, fitted, e2b).plan()
    assert (fitted.layout.chunks, fitted.head.slices) == (chunks, slices)
    assert fitted.cache.contract == "readonly"
    held, axis = (find_chip(chip).figure(name) for name in ("program_bytes", "axis"))
    assert max(shard.weight_bytes for shard in plan.shards) <= held.value
    assert plan.vocab / fitted.head.slices <= axis.value
    assert held.source in fitted.reasons["layout.chunks"]
    assert axis.source in fitted.reasons["head.slices"]


QWEN3 = {
    "model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}  # fmt: skip
"""Qwen3-4B."""


def test_a_size_without_doubts_is_preferred() -> None:
    """Two packages of 1.4 GB are hardly faster than four: less than any prediction can tell."""
    planner = Planner(synthetic.Shapes("qwen3", QWEN3), load_recipe("default"))
    chunks, speeds = recipe_for_chip(planner, Target("m4-max")).layout.chunks, {}
    for count in (2, 4):
        cut = override(planner.recipe, {"layout.kind": "chunks", "layout.chunks": count})
        made = Planner(planner.checkpoint, cut, planner)
        doubted = "program-constants-risky" in audit(sketch(made), Target("m4-max")).severities
        assert doubted is (count == 2)
        step = forecast(made, "m4-max").decode
        assert step is not None
        speeds[count] = step.ms
    assert speeds[2] < speeds[4] < 1.02 * speeds[2]
    assert chunks == 4


def test_what_the_user_names_stays(e2b: Planner) -> None:
    named = override(e2b.recipe, {"head.slices": 2, "tokens.verify": 3})
    planner = Planner(e2b.checkpoint, named, e2b)
    fitted = recipe_for_chip(planner, Target("a19-pro"), {"head.slices", "tokens.verify"})
    assert (fitted.head.slices, fitted.tokens.verify, fitted.layout.chunks) == (2, 3, 4)
    assert not {"head.slices", "tokens.verify"} & fitted.reasons.keys()
    chunks = override(e2b.recipe, {"layout.kind": "per-layer"})
    assert recipe_for_chip(Planner(e2b.checkpoint, chunks, e2b), Target("a19-pro")) == chunks


def test_auto_may_be_named(e2b: Planner) -> None:
    """Then the choice is the same as if the recipe alone says so."""
    named = recipe_for_chip(e2b, Target("a19-pro"), {"layout", "layout.kind"})
    assert named == recipe_for_chip(e2b, Target("a19-pro"))
    assert (named.layout.kind, named.layout.chunks) == ("chunks", 4)


def test_a_padded_cache_needs_its_contract_to_be_named(e2b: Planner) -> None:
    """The rules ask for another one than padding does."""
    cache = {"cache.contract": "stateful", "cache.padded": True}
    padded = Planner(e2b.checkpoint, override(e2b.recipe, cache))
    with pytest.raises(CetaneError, match=r"readonly for m4-max, .*padded.*contract=stateful"):
        recipe_for_chip(padded, Target("m4-max"))
    assert (
        recipe_for_chip(padded, Target("m4-max"), ["cache.contract"]).cache.contract == "stateful"
    )


def test_a_chip_without_figures_gets_no_number(e2b: Planner) -> None:
    """An A13 is not an A19 Pro, whose speed it had."""
    for chip in ("a13", "a17-pro", "m5-max"):
        assert forecast(e2b, chip).decode is None
        assert forecast(e2b, chip).as_json()["modes"] == []
        assert "predicted" not in recipe_for_chip(e2b, Target(chip)).reasons["layout.chunks"]
    assert forecast(e2b, "a19-pro").decode is not None


def test_a_program_that_no_layout_makes_small(e2b: Planner) -> None:
    """In fp16 the head alone is larger than what any phone is known to hold."""
    wide = override(e2b.recipe, {"compression.types.head": "fp16", "head.slices": 1})
    planner = Planner(e2b.checkpoint, wide, e2b)
    head = round(2 * 262_144 * 1_536 / 1e6)
    limit = (
        f"no number of packages fits A19 Pro: that takes a program of at least {head} MB, .* 527"
    )
    with pytest.raises(CetaneError, match=limit) as told:
        recipe_for_chip(planner, Target("a19-pro"), {"head.slices"})
    assert str(told.value.hint).startswith("it does not fit in 4 bits either")


@pytest.mark.parametrize(("layers", "helps"), [(40, True), (120, False)])
def test_more_programs_than_a_chip_holds(layers: int, helps: bool) -> None:
    """A program for each layer and mode; in 4 bits, two layers of 0.2 GB share one."""
    config = {**QWEN, "hidden_size": 8192, "intermediate_size": 12288, "num_attention_heads": 64,
              "vocab_size": 32000, "num_hidden_layers": layers}  # fmt: skip
    planner = Planner(synthetic.Shapes("qwen", config), load_recipe("default"))
    limit = rf"takes {3 * layers + 3} programs of at most 527 MB, and it holds 100"
    with pytest.raises(CetaneError, match=limit) as told:
        recipe_for_chip(planner, Target("a19-pro"))
    assert ("--bits 4" in str(told.value.hint)) is helps
    assert "--quality" not in str(told.value.hint)


@pytest.mark.parametrize(("chip", "most"), [("a13", 4), ("a15", 6), ("a19-pro", 12), ("m1", None)])
def test_the_memory_of_a_phone(chip: str, most: int | None, e2b: Planner) -> None:
    """It is never borrowed from another chip. A plan needs its weights and its caches."""
    wanted, plan = None if most is None else most * 2**30, e2b.plan()
    bytes_of_shards = sum(shard.weight_bytes for shard in plan.shards)
    needed = bytes_of_shards + plan.kv_bytes[e2b.recipe.cache.context]
    assert forecast(e2b, chip).as_json()["memory"] == {"needed": needed, "most": wanted}


def test_small_models_take_one_package() -> None:
    recipe = override(load_recipe("default"), {"cache.context": 256})
    fitted = recipe_for_chip(
        Planner(UnreadCheckpoint(build_model("llama")), recipe), Target("a19-pro")
    )
    assert fitted.layout.chunks == 1 and fitted.head.slices == 1


def test_a_recipe_without_a_verifier_keeps_none(e2b: Planner) -> None:
    planner = Planner(e2b.checkpoint, override(e2b.recipe, {"tokens.verify": 0}), e2b)
    assert recipe_for_chip(planner, Target("a19-pro")).tokens.verify is None


@pytest.mark.parametrize(
    ("steps", "width"),
    [
        ({2: 1.0, 4: 1.1, 8: 1.25}, 8),
        ({2: 1.0, 4: 1.25, 8: 1.3}, 4),
        ({2: 1.9, 4: 2.5, 8: 5.0}, 4),  # drafts pay at 0.9, 0.5 and 0.57 right tokens
        ({2: 2.0, 4: 4.0, 8: 8.0}, 2),  # experts that share nothing
    ],
)
def test_the_width_of_a_verifying_call(
    steps: dict[int, float], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def predict(planner: Planner, chip: object, mode: str) -> SimpleNamespace:
        return SimpleNamespace(ms=3 * steps.get(planner.recipe.tokens.by_mode()[mode], 1.0))

    monkeypatch.setattr(chip_layout, "predict", predict)
    recipe = override(load_recipe("default"), {"cache.context": 256})
    planner = Planner(UnreadCheckpoint(build_model("llama")), recipe)
    changes, reason = chip_layout.by_free_drafts(planner, Target("a19-pro"))
    assert changes == {"tokens.verify": width}
    assert f"{steps[width]:.2f} steps" in reason


QWEN = {
    "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064,
    "max_position_embeddings": 131072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip
"""Qwen2.5-7B, of whose layers seven keep 2^28.8 keys of 128K tokens."""


@pytest.fixture(scope="module")
def long() -> Planner:
    recipe = override(load_recipe("default"), {"cache.context": 131072})
    return Planner(synthetic.Shapes("qwen", QWEN), recipe)


def test_a_cache_that_no_program_may_have_is_refused(long: Planner) -> None:
    """By the very limit of what reads programs; a chip gets a layout of smaller ones."""
    keys = (7, 4, 128, 131072)
    with pytest.raises(CetaneError, match=re.escape(f"{keys} has more than 268,435,456")) as told:
        long.plan()
    assert "layout.chunks" in str(told.value.hint)
    with pytest.raises(ValueError, match="more than 268435456 elements"):
        _check_sizes("keys", TensorType(keys, "fp16"))
    fitted = recipe_for_chip(long, Target("m4-max"))
    assert fitted.layout.chunks is not None and fitted.layout.chunks >= 7
    plan = Planner(long.checkpoint, fitted, long).plan()
    for function in plan.functions.values():
        for item in (*function.inputs, *function.outputs):
            _check_sizes(item.name, TensorType(item.shape, "fp16"))


def test_a_ranking_refuses_it_too(long: Planner) -> None:
    recipe = override(long.recipe, {"layout.kind": "chunks", "compression.default": "fp16"})
    sweep = Combinations(long.checkpoint, recipe, find_chip("m4-max"))
    refusals = {}
    for name in ("2 chunks", "per-layer"):
        made = sweep.planner(sweep.layouts()[name], "readonly", "fp16", 4, 131072)
        assert made is not None
        refusals[name] = sweep.refusal(made)
    assert "has more than 268,435,456 elements" in str(refusals["2 chunks"])
    assert "elements" not in str(refusals["per-layer"])
