"""The first shard of every kind is judged alone, before the others."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint, open_checkpoint
from cetane.engine.authored import authored_engine
from cetane.errors import CetaneError
from cetane.gates import metrics
from cetane.gates.ladder import LadderResult, Rung, ladder, of_choices
from cetane.gates.reference import Reference
from cetane.gates.scores import ShardScore, shard_score
from cetane.lower.lower import Lowering
from cetane.planner import Planner
from cetane.schema.recipe import Recipe

from .conftest import ROUTED, changed, zaya_recipe

TOKENS = tuple(int(t) for t in np.random.default_rng(5).integers(1, 288, 14))
"""One call of 8 tokens, and 6 more."""


def climb(bundle: Bundle, checkpoint: Checkpoint) -> LadderResult:
    """The ladder on what a build would have given it."""
    planner = Planner(checkpoint, bundle.plan.recipe)
    first = [shards[0] for shards in Lowering(planner, checkpoint).kinds().values()]
    return ladder(checkpoint, planner, {shard: bundle.shard(shard) for shard in first})


def failed(result: LadderResult) -> list[str]:
    return [check.name for check in result.checks if not check.passed]


LLAMAS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a block each": (
        {"verify": None, "prefill": None, "layout": {"kind": "per-block"}, "context": 32},
        ["hidden of layer-00 (decode)", "logits of head-0 (decode)"],
    ),
    "single": (
        {
            "contract": "stateful",
            "layout": {"kind": "single"},
            "tensor_layout": "ct1",
            "head": {"slices": 2},
        },
        [f"logits of model ({mode})" for mode in ("decode", "verify", "prefill")],
    ),
}


@pytest.mark.parametrize(("options", "checks"), LLAMAS.values(), ids=LLAMAS)
def test_a_right_llama(
    options: dict[str, Any],
    checks: list[str],
    tiny_bundle: Callable[..., Bundle],
    checkpoint: Checkpoint,
) -> None:
    bundle = tiny_bundle(**options)
    found = climb(bundle, checkpoint)
    assert found.passed
    assert [check.name for check in found.checks] == ["wrong constants", *checks]
    assert {score.mode for score in found.shards} == bundle.plan.modes.keys()


def test_chunks_and_heads(good: Bundle, checkpoint: Checkpoint) -> None:
    """Heads of other sizes are other kinds; every figure is of fp16."""
    found = climb(good, checkpoint)
    assert found.passed
    assert [(s.shard, s.tensor, s.truth, s.mode) for s in found.shards] == [
        (shard, tensor, truth, mode)
        for shard, tensor, truth in [
            ("chunk-00", "hidden", "model.layers.1"),
            ("head-0", "logits", "lm_head"),
            *([("head-1", "logits", "lm_head")] if "head-1" in climbed(found) else []),
        ]
        for mode in ("decode", "prefill")
    ]
    assert all(score.cosine_min > 1 - 1e-6 for score in found.shards)


def climbed(result: LadderResult) -> set[str]:
    return {score.shard for score in result.shards}


def test_a_wrong_weight(bad: Bundle, checkpoint: Checkpoint) -> None:
    """It is in the layers; the heads are judged alone, and right."""
    found = climb(bad, checkpoint)
    assert not found.passed
    assert failed(found) == ["wrong constants"]
    assert [w.parameter for w in found.wrong_weights] == ["model.layers.1.mlp.down_proj.weight"]
    assert climb(bad, open_checkpoint(bad.manifest.source)).passed


def test_a_damaged_weight_in_a_layer_that_is_no_rung(
    tiny_bundle: Callable[..., Bundle], tiny_checkpoint_folder: Path, tmp_path: Path
) -> None:
    """The model hands its NaN to the layer that is judged, whose own weights are right."""
    name = "model.layers.0.mlp.up_proj.weight"

    def damage(weights: dict[str, torch.Tensor]) -> None:
        weights[name][3, 5] = torch.nan

    bundle = tiny_bundle(verify=None, prefill=None, layout={"kind": "per-block"}, context=32)
    damaged = open_checkpoint(changed(tiny_checkpoint_folder, tmp_path / "damaged", damage))
    planner = Planner(damaged, bundle.plan.recipe)
    with pytest.raises(CetaneError, match=f"^{name} holds NaN") as raised:
        ladder(damaged, planner, {"layer-01": bundle.shard("layer-01")})
    assert raised.value.hint == "the checkpoint is damaged: download it again"


@pytest.mark.parametrize(
    ("options", "checks"),
    [
        ({}, {"hidden of attn-00", "hidden of moe-00", "router of moe-00",
              "hidden of moe-01", "logits of head-0"}),
        (ROUTED, {"hidden of layer-00", "router of layer-00",
                  "hidden of layer-01", "logits of head-0"}),
    ],
    ids=["dense", "routed"],
)  # fmt: skip
def test_a_right_zaya(
    options: dict[str, Any],
    checks: set[str],
    zaya_bundle: Callable[..., Bundle],
    zaya_checkpoint: Checkpoint,
) -> None:
    """Both expert blocks are judged, since the first has no router state to add to."""
    found = climb(zaya_bundle(**options), zaya_checkpoint)
    assert found.passed
    modes = ("decode", "prefill") if options else ("decode",)
    named = {f"{check} ({mode})" for check in checks for mode in modes}
    assert {check.name for check in found.checks} == {"wrong constants", *named}
    assert {s.mode for s in found.shards} == {*modes}


def test_a_departure(departed: Bundle, zaya_checkpoint: Checkpoint) -> None:
    """Experts and heads are judged alone, and right."""
    found = climb(departed, zaya_checkpoint)
    assert failed(found) == ["hidden of attn-00 (decode)"]
    assert climbed(found) == {"attn-00", "moe-00", "moe-01", "head-0"}


def rungs(
    checkpoint: Any, recipe: Recipe, weights: Any = None, reference: Any = None
) -> dict[str, list[ShardScore]]:
    """Scores of every shard of the authored modules, without building a program."""
    planner = Planner(checkpoint, recipe)
    engine = authored_engine(planner, weights or checkpoint)
    rung = Rung(engine, planner, reference or Reference(checkpoint), TOKENS)
    modes = list(engine.plan.modes)
    return {
        shard.name: [
            shard_score(shard.name, p.tensor, p.truth, p.mode, [(p.ours, p.wanted)])
            for p in rung.pairs(shard.name, modes)
        ]
        for shard in engine.plan.shards
    }


LAYOUTS: list[dict[str, Any]] = [
    {"kind": "per-block"},
    {"kind": "per-layer"},
    {"kind": "chunks", "chunks": 1},
    {"kind": "single"},
    {"kind": "per-block", "routed": ["prefill"]},
    {"kind": "per-layer", "routed": ["decode"]},
    {"kind": "chunks", "chunks": 1, "routed": ["decode", "prefill"]},
    {"kind": "single", "routed": ["decode"]},
]


@pytest.mark.parametrize("order", ["c1t", "ct1"])
@pytest.mark.parametrize("contract", ["readonly", "blend", "shift", "stateful"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: " ".join(map(str, x.values())))
def test_every_layout(
    layout: dict[str, Any],
    contract: str,
    order: str,
    zaya_model: Any,
    in_memory: Callable[..., Any],
) -> None:
    """Fed with the truth, every shard of a right port computes the truth, in every mode."""
    recipe = zaya_recipe(
        layout=layout,
        cache={"contract": contract, "context": 32},
        tokens={"verify": 0, "prefill": 8},
        head={"slices": 2},
        tensor_layout=order,
    )
    found = rungs(in_memory(zaya_model), recipe)
    for scores in found.values():
        assert {score.mode for score in scores} == {"decode", "prefill"}
        assert all(score.cosine_min > 1 - 1e-5 and score.psnr > 80 for score in scores)
    assert [name for name, scores in found.items() if scores[-1].tensor == "logits"] == (
        ["model"] if layout["kind"] == "single" else ["head-0", "head-1"]
    )


@pytest.mark.parametrize(
    ("wrong", "found_in"),
    [
        ("model.layers.0.mlp.down_proj.weight", {"layer-00"}),
        ("model.layers.1.self_attn.o_proj.weight", {"layer-01"}),
        ("model.norm.weight", {"head-0", "head-1"}),
    ],
)
def test_a_shard_is_judged_alone(
    wrong: str,
    found_in: set[str],
    tiny_model: Callable[..., Any],
    in_memory: Callable[..., Any],
    recipe: Callable[..., Recipe],
) -> None:
    """What is wrong before a shard is not held against it."""
    checkpoint, weights = in_memory(tiny_model()), in_memory(tiny_model())
    weights.tensors[wrong] = weights.tensors[wrong].flip(0)
    made = recipe(layout={"kind": "per-block"}, head={"slices": 2})
    found = rungs(checkpoint, made, weights)
    assert {name for name, scores in found.items() if scores[0].cosine < 0.9999} == found_in
    for scores in found.values():
        assert {score.mode for score in scores} == {"decode", "verify", "prefill"}


def test_a_wrong_slice_of_the_head(
    tiny_model: Callable[..., Any], in_memory: Callable[..., Any], recipe: Callable[..., Recipe]
) -> None:
    checkpoint, weights = in_memory(tiny_model()), in_memory(tiny_model())
    weights.tensors["lm_head.weight"][-1] *= -9
    found = rungs(checkpoint, recipe(head={"slices": 2}), weights)
    assert {name for name, scores in found.items() if scores[0].cosine < 0.9999} == {"head-1"}


@pytest.mark.parametrize("choose", [True, "argmax"])
@pytest.mark.parametrize("wrong", [False, True])
def test_a_head_that_chooses(
    wrong: bool,
    choose: bool | str,
    tiny_model: Callable[..., Any],
    in_memory: Callable[..., Any],
    recipe: Callable[..., Recipe],
) -> None:
    checkpoint, weights = in_memory(tiny_model()), in_memory(tiny_model())
    if wrong:
        weights.tensors["lm_head.weight"] *= 1.5
    planner = Planner(checkpoint, recipe(head={"slices": 2, "choose": choose}))
    rung = Rung(authored_engine(planner, weights), planner, Reference(checkpoint), TOKENS)
    for head in ("head-0", "head-1"):
        for pair in rung.pairs(head, ["decode"]):
            errors = metrics.relative(pair.ours, pair.wanted)
            assert (errors > 0.1).all() if wrong else (errors < 1e-5).all()


def test_a_choice_of_another_token() -> None:
    """Its logit alone may be right."""
    theirs = np.array([[1.0, 5.0, 4.0]])
    ours = np.array([[-4e4, -4e4, 5.0]])
    assert metrics.relative(*of_choices(ours, theirs))[0] > 0.1
    assert metrics.relative(*of_choices(np.array([[-4e4, 5.0, -4e4]]), theirs))[0] == 0


@pytest.mark.parametrize(
    ("departure", "found_in"),
    [
        ("no-qk-norm", {("attn-00", "hidden"), ("attn-01", "hidden")}),
        ("undelayed-value", {("attn-00", "hidden"), ("attn-01", "hidden")}),
        ("no-router-state", {("moe-01", "hidden")}),
        ("residual-order", {(s, "hidden") for s in ("attn-00", "moe-00", "attn-01", "moe-01")}),
        ("raw-embedding", {("attn-00", "hidden")}),
    ],
)
def test_where_a_departure_is(
    departure: str, found_in: set[tuple[str, str]], zaya_model: Any, in_memory: Callable[..., Any]
) -> None:
    """In the blocks that depart, and in no others."""
    recipe = zaya_recipe(family={"departures": [departure]})
    found = rungs(in_memory(zaya_model), recipe)
    scores = [score for of_shard in found.values() for score in of_shard]
    assert {(s.shard, s.tensor) for s in scores if s.cosine < 0.9999} == found_in


def test_a_shard_needs_only_the_layers_before_it(
    tiny_model: Callable[..., Any], in_memory: Callable[..., Any], recipe: Callable[..., Recipe],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of a large model, later layers are never read."""
    monkeypatch.setattr("cetane.gates.reference.RESIDENT", 0)
    checkpoint = in_memory(tiny_model(num_hidden_layers=3))
    planner = Planner(checkpoint, recipe(layout={"kind": "per-block"}))
    theirs = in_memory(tiny_model(num_hidden_layers=3))
    names: list[str] = []
    read = theirs.read
    theirs.read = lambda name: (names.append(name), read(name))[1]
    rung = Rung(authored_engine(planner, checkpoint), planner, Reference(theirs), TOKENS)
    for shard, unread in (
        ("layer-00", "layers.1."),
        ("layer-01", "layers.2."),
        ("head-0", "layers.1."),
    ):
        names.clear()
        for pair in rung.pairs(shard, list(planner.plan().modes)):
            assert metrics.relative(pair.ours, pair.wanted).max() < 1e-5
        assert names
        assert not [name for name in names if unread in name]
    assert names[-2:] == ["model.norm.weight", "lm_head.weight"]


def test_limits_are_the_structures(
    good: Bundle, checkpoint: Checkpoint, asked: Callable[..., None]
) -> None:
    """Whatever the recipe compresses."""
    asked("structure", relative=1e-30)
    found = climb(good, checkpoint)
    assert failed(found) == [check.name for check in found.checks[1:]]
    assert {check.limit for check in found.checks[1:]} == {1e-30}
