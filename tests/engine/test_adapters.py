"""Adapters beside a base, on the programs: peft's models are the truth."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.conftest import build_model
from tests.families.matrix_models import FALCON, GRANITE_HYBRIDS, NEMOTRONS, OLMO_HYBRID
from tests.peft_folders import save_adapter
from transformers import DynamicCache

from cetane.checkpoint import open_checkpoint
from cetane.engine.authored import authored_engine
from cetane.engine.engine import Engine
from cetane.engine.portable import PortableBackend
from cetane.engine.prefixes import Prefixes
from cetane.errors import CetaneError
from cetane.fitting.cache import extending
from cetane.mil.blob import BlobFile
from cetane.pipeline.language_model import load
from cetane.planner import Planner
from cetane.schema.slots import CONTRACTS

IDS = np.random.default_rng(3).integers(1, 288, 24).tolist()


@pytest.fixture(scope="module")
def engine(adapted: Any) -> Engine:
    bundle = adapted.bundle
    return Engine(bundle.plan, PortableBackend(bundle), bundle.tables())


@torch.inference_mode()
def logits(model: Any, tokens: list[int]) -> np.ndarray:
    """The model's logits `(n, V)`."""
    return model(torch.tensor([tokens])).logits[0].numpy()


@pytest.mark.parametrize("adapter", [None, "plain", "dora"])
def test_logits_are_those_of_the_merged_model(
    adapter: str | None, adapted: Any, engine: Engine
) -> None:
    wanted = logits(adapted.merged[adapter], IDS)
    for modes in (["decode"], ["decode", "prefill"]):
        ours = engine.session(modes, adapter=adapter).feed(IDS, "all")
        np.testing.assert_allclose(ours, wanted, rtol=0, atol=0.02)  # weights are fp16
    assert np.array_equal(ours.argmax(1), wanted.argmax(1))


def test_the_truths_differ(adapted: Any) -> None:
    base, plain, dora = (logits(model, IDS) for model in adapted.merged.values())
    assert np.abs(base - plain).max() > 0.5
    assert np.abs(base - dora).max() > 0.1


@pytest.mark.parametrize("contract", CONTRACTS)
@torch.inference_mode()
def test_an_adapter_changes_between_two_tokens(contract: str, adapted: Any, recipe: Any) -> None:
    """Keys and values of earlier tokens stay as their own adapter made them."""
    checkpoint = open_checkpoint(adapted.base, adapters=adapted.folders)
    engine = authored_engine(Planner(checkpoint, recipe(contract)), checkpoint)
    parts = [("plain", IDS[:9]), (None, IDS[9:13]), ("dora", IDS[13:20]), ("plain", IDS[20:])]
    session, wanted, ours = engine.session(), [], []
    cache = DynamicCache(config=adapted.merged["plain"].config)
    for adapter, tokens in parts:
        model = adapted.merged[adapter]
        wanted.append(model(torch.tensor([tokens]), **extending(model, cache)).logits[0].numpy())
        session.adapter = adapter
        ours.append(session.feed(tokens, "all"))
    np.testing.assert_allclose(np.concatenate(ours), np.concatenate(wanted), rtol=0, atol=1e-4)
    alone = logits(adapted.merged["plain"], IDS)[-1]
    assert np.abs(wanted[-1][-1] - alone).max() > 0.1  # the switches count


FAMILIES: dict[str, dict[str, Any]] = {
    "phi3": {},
    "granite": {"residual_multiplier": 0.3, "logits_scaling": 2.0},
    "gemma3_text": {"sliding_window": 16, "tie_word_embeddings": True},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "qwen2": {"num_hidden_layers": 1},
    "falcon_h1": FALCON,
    "granitemoehybrid": GRANITE_HYBRIDS["dense"],
    "nemotron_h": NEMOTRONS["dense"],
    "olmo_hybrid": OLMO_HYBRID,
}
WITHOUT_OUTPUTS = ["in_proj", "q_proj", "k_proj", "v_proj", "up_proj", "down_proj"]
TARGETS = {"falcon_h1": WITHOUT_OUTPUTS, "nemotron_h": WITHOUT_OUTPUTS}
"""peft refuses to change `out_proj` of their Mamba-2."""


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_families(
    family: str, split: bool, tmp_path: Path, recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No family knows of adapters: fused and split projections, factors and biases all work."""
    if split:
        monkeypatch.setattr("cetane.families.base.on_notch", lambda *_: True)
        monkeypatch.setattr("cetane.families.base.cut", lambda _, inputs, __: inputs // 2)
    model = build_model(family, **FAMILIES[family])
    model.save_pretrained(tmp_path / "base")
    bias = "all" if family == "qwen2" else "none"
    targets = TARGETS.get(family, "all-linear")
    merged = save_adapter(
        tmp_path / "lora", model, r=2, target_modules=targets, use_dora=True, bias=bias
    )
    checkpoint = open_checkpoint(tmp_path / "base", adapters={"a": tmp_path / "lora"})
    planner = Planner(checkpoint, recipe(lowering={"split_contracting": split}))
    engine = authored_engine(planner, checkpoint)
    wanted = logits(merged, IDS)
    assert np.abs(wanted - logits(model, IDS)).max() > 0.5
    ours = engine.session(adapter="a").feed(IDS, "all")
    np.testing.assert_allclose(ours, wanted, rtol=0, atol=1e-4)


def test_a_refused_draft_leaves_nothing(adapted: Any, engine: Engine) -> None:
    session = engine.session(adapter="dora")
    session.feed(IDS[:12])
    session.evaluate([5, 6, 7])
    session.accept(0)
    session.adapter = "plain"
    session.evaluate(IDS[12:15])
    session.accept(3)
    clean = engine.session(adapter="dora")
    clean.feed(IDS[:12])
    clean.adapter = "plain"
    clean.evaluate(IDS[12:15])
    clean.accept(3)
    assert np.array_equal(session.feed(IDS[15:16]), clean.feed(IDS[15:16]))


def test_the_base_is_stored_once(adapted: Any) -> None:
    """Every weight file holds the bytes of the base, and of each adapter, once."""
    plan = adapted.bundle.plan
    for shard in plan.shards:
        package = adapted.bundle.shard(shard.name)
        size = BlobFile(package / "Data/com.apple.CoreML/weights/weight.bin").size
        entries = 60 * 128  # headers and alignment
        assert (
            size
            <= shard.weight_bytes
            + sum(adapter.weight_bytes for adapter in plan.adapters.values())
            + entries
        )
        assert size < 2 * shard.weight_bytes
    stored = {
        name: load_file(folder / "adapter_model.safetensors")
        for name, folder in adapted.folders.items()
    }
    elements = sum(tensor.numel() for tensor in stored["plain"].values())
    assert plan.adapters["plain"].weight_bytes == 2 * elements
    assert plan.adapters["dora"].weight_bytes == 2 * sum(
        tensor.numel() for tensor in stored["dora"].values()
    )


def test_prefixes_are_not_shared(engine: Engine) -> None:
    prefixes = Prefixes(engine)
    for adapter in (None, "plain", "dora", "plain", None):
        fed = prefixes.feed(IDS[:16], adapter=adapter)
        fresh = Prefixes(engine, most=0).feed(IDS[:16], adapter=adapter)
        assert np.array_equal(fed.logits, fresh.logits)
    assert prefixes.feed(IDS[:16], adapter="plain").cached == 16
    assert prefixes.feed([*IDS[:16], 5], adapter="dora").cached == 16
    assert Prefixes(engine).feed(IDS[:16], adapter="dora").cached == 0


def test_an_unknown_adapter_is_refused(adapted: Any, engine: Engine) -> None:
    with pytest.raises(CetaneError, match="known: dora, plain"):
        engine.session(adapter="other")
    session = engine.session(adapter="dora")
    with pytest.raises(CetaneError, match="no adapter"):
        session.adapter = "other"
    assert session.adapter == "dora"
    with pytest.raises(CetaneError, match="no adapter"):
        load(adapted.bundle.path, adapter="other")


def test_a_bundle_without_adapters_says_how_to_get_some(engine: Engine) -> None:
    plan = engine.plan.model_copy(update={"adapters": {}})
    with pytest.raises(CetaneError, match="no adapter 'a'; known: none") as refusal:
        plan.on("a")
    assert "--adapter NAME=FOLDER" in (refusal.value.hint or "")


def test_a_language_model_switches(adapted: Any) -> None:
    with load(adapted.bundle.path, adapter="plain") as model:
        for adapter in ("plain", None, "dora"):
            model.adapter = adapter
            ids = model.ids("The rating of how readily")
            answer = model.generate(ids, max_new_tokens=8)
            whole = [*ids, *answer.tokens]
            wanted = logits(adapted.merged[adapter], whole).argmax(1)[len(ids) - 1 : -1]
            assert list(answer.tokens) == wanted.tolist()
            ours = model.logits(ids)
            np.testing.assert_allclose(ours, logits(adapted.merged[adapter], ids), rtol=0, atol=0.2)
