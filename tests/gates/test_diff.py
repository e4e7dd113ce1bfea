"""Bundles in which one thing is wrong: the shard, the op and the cause must be named."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import build_model, build_tokenizer, tiny_recipe
from tests.families.gemma_models import FULL, SLIDING, build_gemma4, recipe
from tests.peft_folders import save_adapter

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint, open_checkpoint
from cetane.errors import CetaneError
from cetane.gates import diff
from cetane.gates.diff import AgainstModel, ModelDiff, compare_bundles, compare_tables, probe
from cetane.mil import load
from cetane.mil.comparison import DRIFT, TOLERANCE, Comparison, worst
from cetane.pipeline.build import build
from cetane.pipeline.origin import checkpoint_of
from cetane.planner import Planner

from .conftest import ROUTED, changed

pytestmark = pytest.mark.usefixtures("shared_templates")
TINY = {"verify": None, "layout": {"kind": "per-layer"}}


def silent(*_: Any) -> None:
    pass


def against(bundle: Bundle, checkpoint: Checkpoint, mode: Any = "prefill") -> ModelDiff:
    return AgainstModel(bundle, checkpoint, mode).run(TOLERANCE, silent)


def test_a_wrong_row_of_a_weight(good: Bundle, bad: Bundle) -> None:
    found, tables = compare_bundles(good, bad, "prefill", "fp32", silent)
    assert {gap.relative for gap in tables.values()} == {0}
    shards = [shard.name for shard in good.plan.shards]
    assert list(found) == [(shard, "prefill") for shard in shards]
    layers, *heads = found.values()
    (op,) = [op for op in layers.ops if op.own.relative > TOLERANCE]
    assert op == layers.first_own(TOLERANCE)
    assert (op.kind, op.scope) == ("conv", "layer-01/mlp_down_proj")
    assert op.own.worst[1] == 3  # the row
    assert [cause.partition(":")[0] for cause in op.causes] == ["weights"]
    assert layers.outputs["hidden_out"].relative > TOLERANCE
    # The heads get what the good bundle makes, so they agree.
    assert not any(head.parted(1e-6) for head in heads)


@pytest.mark.parametrize("mode", ["decode", "prefill"])
def test_a_bundle_with_itself(good: Bundle, mode: Any) -> None:
    found, _ = compare_bundles(good, good, mode, "fp32", silent)
    assert all(op.own.relative == 0 for part in found.values() for op in part.ops)
    assert not any(part.parted(0) for part in found.values())


def test_a_right_bundle_in_fp16(good: Bundle) -> None:
    found, _ = compare_bundles(good, good, "prefill", "fp16", silent)
    assert all(op.half for part in found.values() for op in part.ops)
    rounding = max(op.own.relative for part in found.values() for op in part.ops)
    assert 1e-5 < rounding <= 2**-11
    assert not any(part.parted(TOLERANCE) for part in found.values())


def test_calls_go_on_from_each_other(good: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call reads a cache that is not empty."""
    calls: list[Comparison] = []
    monkeypatch.setattr(diff, "worst", lambda found: calls.extend(found) or worst(found))
    compare_bundles(good, good, "prefill", "fp32", silent)
    width = good.plan.modes["prefill"].tokens
    assert len(probe(good, "prefill")) == 2 * width
    pasts = [
        max(abs(i.low), abs(i.high))
        for call in calls
        for op in call.ops[:40]
        for i in op.inputs
        if i.name == "kv_k"
    ]
    assert pasts[0] == 0 < pasts[-1]


def test_bundles_that_are_cut_differently(good: Bundle, departed: Bundle) -> None:
    with pytest.raises(CetaneError, match="cut into different shards: chunk-00, head-0, head-1"):
        compare_bundles(good, departed, "decode", "fp32", silent)


def test_a_right_bundle_against_its_model(good: Bundle, checkpoint: Checkpoint) -> None:
    found = against(good, checkpoint)
    assert found.suspect is found.cause is None
    assert [h.shard for h in found.handed] == [shard.name for shard in good.plan.shards]
    assert all(0 < h.gap.relative < 5e-3 for h in found.handed)


def test_wrong_weights_against_the_model(bad: Bundle, checkpoint: Checkpoint) -> None:
    found = against(bad, checkpoint)
    shard = bad.plan.shards[0].name
    assert (found.suspect, found.cause) == (shard, "weights")
    errors = {stage.name: stage.relative for stage in found.stages}
    assert 0 < errors["authoring"] < errors["conversion"] < 2e-3  # the embedding is fp16
    assert errors["weights"] == pytest.approx(errors["fp16"], rel=0.05)
    assert errors["weights"] > DRIFT * TOLERANCE
    (part,) = found.comparisons.values()
    op = part.first_own(TOLERANCE)
    assert op is not None
    assert op.scope == "layer-01/mlp_down_proj"


def test_a_model_that_fp16_cannot_hold(tiny_checkpoint_folder: Path, tmp_path: Path) -> None:
    """The product inside the second layer's feed-forward passes 65504, its projection does not."""

    def scale(weights: dict[str, torch.Tensor]) -> None:
        name = "model.layers.1.mlp.{}_proj.weight".format
        for factor, kinds in ((200.0, ("up", "gate")), (1e-3, ("down",))):
            for kind in kinds:
                weights[name(kind)] *= factor

    checkpoint = open_checkpoint(changed(tiny_checkpoint_folder, tmp_path / "checkpoint", scale))
    bundle = build(checkpoint, tiny_recipe(**TINY), tmp_path / "bundle", silent)
    found = against(bundle, checkpoint)
    assert (found.suspect, found.cause) == ("layer-01", "fp16")
    (part,) = found.comparisons.values()
    op = part.first_own(TOLERANCE)
    assert op is not None
    assert op.kind == "mul"
    assert op.scope.startswith("after layer-01/mlp_")
    assert op.causes == ("fp16: overflow",)
    assert op.largest > 65504


def test_a_departure_is_the_ports_own(departed: Bundle, zaya_checkpoint: Checkpoint) -> None:
    found = against(departed, zaya_checkpoint, "decode")
    assert found.suspect is not None
    assert found.cause == "authoring"
    assert found.comparisons == {}


def test_a_wrong_conversion(
    bad: Bundle, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A converter that damages a weight whatever its format."""
    monkeypatch.setattr(AgainstModel, "lower", lambda _, shard, __: bad.shard(shard))
    found = against(bad, checkpoint)
    assert found.cause == "conversion"
    assert found.comparisons == {}


def test_experts_that_run_by_themselves(
    zaya_bundle: Callable[..., Bundle], zaya_checkpoint: Checkpoint
) -> None:
    routed = zaya_bundle(**ROUTED | {"tokens": {"verify": 0, "prefill": 0}})
    found, _ = compare_bundles(routed, routed, "decode", "fp16", silent)
    assert any(function.startswith("expert-") for _, function in found)
    assert not any(part.parted(TOLERANCE) for part in found.values())


def functions(bundle: Bundle, mode: str) -> set[tuple[str, str]]:
    """The functions in the packages that are of a mode, by shard."""
    return {
        (shard.name, name)
        for shard in bundle.plan.shards
        for name in load(bundle.shard(shard.name)).functions
        if name.startswith(mode)
    }


def test_functions_of_every_capacity(
    tiny_bundle: Callable[..., Bundle], checkpoint: Checkpoint
) -> None:
    wanted = tiny_recipe(verify=None, layout={"kind": "chunks", "chunks": 1})
    cache = wanted.model_dump()["cache"] | {"capacities": (32,)}
    bundle = tiny_bundle(verify=None, layout=wanted.model_dump()["layout"], cache=cache)
    found, _ = compare_bundles(bundle, bundle, "prefill", "fp32", silent)
    assert ("chunk-00", "prefill-c32") in found
    assert found.keys() == functions(bundle, "prefill")
    told = [(h.shard, h.tensor) for h in against(bundle, checkpoint).handed]
    assert told == [
        (shard, f"at {tokens}: {tensor}")
        for shard, tensor in (("chunk-00", "hidden"), ("head-0", "logits"))
        for tokens in (32, 64)
    ]


def test_functions_of_every_adapter(adapted: Any, tmp_path: Path) -> None:
    """Against the adapters that were built, and against another one in the place of one."""
    bundle = adapted.bundle
    found, _ = compare_bundles(bundle, bundle, "decode", "fp32", silent)
    assert ("chunk-00", "decode-dora") in found
    assert found.keys() == functions(bundle, "decode")
    assert against(bundle, checkpoint_of(bundle), "decode").suspect is None

    save_adapter(tmp_path, build_model("llama"), seed=3, target_modules="all-linear", r=3)
    other = checkpoint_of(bundle, adapters={"plain": tmp_path})
    result = against(bundle, other, "decode")
    wrong = {h.tensor for h in result.handed if h.gap.relative > DRIFT * TOLERANCE}
    assert wrong == {"plain: hidden"}
    assert (result.suspect, result.cause) == ("chunk-00", "weights")


@pytest.fixture(scope="module")
def shared_caches(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Bundle]:
    """A Gemma 4 whose second shard reads keys and values of the first, and a bundle in which a row
    of the second is wrong."""
    folder = tmp_path_factory.mktemp("gemma")
    model = build_gemma4(num_hidden_layers=4, layer_types=[SLIDING, FULL] * 2)
    model.save_pretrained(folder / "right")
    build_tokenizer().save_pretrained(folder / "right")

    def perturb(weights: dict[str, torch.Tensor]) -> None:
        weights["model.layers.3.mlp.down_proj.weight"][3] += 1.0

    perturbed = open_checkpoint(changed(folder / "right", folder / "wrong", perturb))
    layout = {"kind": "chunks", "cuts": [2]}
    wanted = recipe(layout=layout, tokens={"verify": 0, "prefill": 8})
    bundle = build(perturbed, wanted, folder / "bundle", silent)
    return open_checkpoint(folder / "right"), bundle


def test_a_shard_that_reads_keys_and_values_of_another(
    shared_caches: tuple[Checkpoint, Bundle],
) -> None:
    checkpoint, bundle = shared_caches
    assert Planner(checkpoint, bundle.plan.recipe).makers("chunk-01") == ["chunk-00"]
    result = against(bundle, checkpoint)
    assert (result.suspect, result.cause) == ("chunk-01", "weights")
    op = result.comparisons["chunk-01", "prefill"].first_own(TOLERANCE)
    assert op is not None and op.scope == "layer-03/mlp_down_proj"


def test_rows_of_every_table(shared_caches: tuple[Checkpoint, Bundle], tmp_path: Path) -> None:
    """Gemma 4 has a second table, with rows for each layer."""
    _, bundle = shared_caches
    folder = shutil.copytree(bundle.path, tmp_path / "bundle")
    rows = np.load(folder / "embedding-per_layer.npy")
    rows[7] += 1
    np.save(folder / "embedding-per_layer.npy", rows)
    sides = bundle.tables(), Bundle(folder).tables()
    same, wrong = (dict(compare_tables(*sides, np.array(t))) for t in ([5, 6], [6, 7]))
    assert {name for name, gap in wrong.items() if gap.relative} == {"table per_layer"}
    assert "embedding" in same and not any(gap.relative for gap in same.values())
