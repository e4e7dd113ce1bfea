"""SmoothQuant's factors: exact, and those of the paper."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import InMemoryCheckpoint, build_model, tiny_recipe
from tests.families.gemma_models import build_gemma3
from tests.families.matrix_models import BAMBA, FALCON, GRANITE_HYBRIDS, OLMO_HYBRID
from tests.families.mixture_models import AFMOE

from cetane.activations.smooth import Smoothed, smooth, smoothing_planner
from cetane.checkpoint import Checkpoint
from cetane.engine.authored import authored_engine
from cetane.errors import CetaneError
from cetane.planner import Planner
from cetane.schema.streaming import Streaming

TEXTS = [np.random.default_rng(seed).integers(1, 288, 20).tolist() for seed in (1, 2)]


class InMemory(InMemoryCheckpoint, Checkpoint):
    """A model in memory with all that a checkpoint has."""

    fingerprint = "in memory"

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._tensors: Any = {}

    def _load_tokenizer(self) -> Any: ...
    def identified(self, identity: Any) -> str:
        return self.fingerprint


def smoothed(model: Any) -> tuple[InMemory, Smoothed]:
    checkpoint = InMemory(model)
    return checkpoint, smooth(checkpoint, Planner(checkpoint, tiny_recipe()), TEXTS)


@pytest.fixture(scope="module")
def pair() -> tuple[InMemory, Smoothed]:
    return smoothed(build_model("llama"))


KINDS: dict[str, dict[str, Any]] = {
    "arcee": {"mlp_bias": True}, "ernie4_5": {}, "glm4": {}, "gpt_neox": {}, "hyperclovax": {},
    "llama": {}, "olmo2": {}, "persimmon": {}, "phi": {}, "phi3": {}, "qwen2": {}, "qwen3": {},
    "starcoder2": {}, "falcon": {}, "gpt_bigcode": {}, "gptj": {"rotary_dim": 8},
    "codegen": {"rotary_dim": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "granitemoehybrid": GRANITE_HYBRIDS["dense"], "falcon_h1": FALCON, "bamba": BAMBA,
    "afmoe": AFMOE, "olmo_hybrid": OLMO_HYBRID,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_is_the_same(kind: str) -> None:
    """Biases, norms of queries and keys, heads that share keys, and several projections in one
    tensor or behind one norm among them."""
    checkpoint, changed = smoothed(build_model(kind, **KINDS[kind]))
    found = []
    for weights in (checkpoint, changed):
        engine = authored_engine(Planner(checkpoint, tiny_recipe()), weights)
        found.append(engine.session().feed(TEXTS[0], "all"))
    np.testing.assert_allclose(found[1], found[0], atol=2e-4)
    named = {name for factors in changed.factors for name in factors}
    weights = {name for name in named if ".layers.1." in name or ".h.1." in name}
    assert len(weights) > 3 and weights <= {*checkpoint.names()}
    for weight in weights:
        assert not torch.allclose(changed.read(weight), checkpoint.read(weight), rtol=0.05)


def test_projections_that_are_cut_in_two(pair: tuple[InMemory, Smoothed]) -> None:
    checkpoint, wanted = pair
    planner = Planner(checkpoint, tiny_recipe())
    for block in planner.model.layers:
        for path in ("mlp.up_proj", "mlp.down_proj"):
            block.get_submodule(path).split(32)
    changed = smooth(checkpoint, planner, TEXTS)
    for name in checkpoint.names():
        torch.testing.assert_close(changed.read(name), wanted.read(name), rtol=1e-4, atol=1e-6)


def test_factors_are_those_of_the_paper(pair: tuple[InMemory, Smoothed]) -> None:
    """Of down_proj, computed by the Hugging Face model: s = max|X|^0.5 / max|W|^0.5."""
    checkpoint, changed = pair
    model, name = build_model("llama"), "model.layers.0.mlp.down_proj"
    seen: list[torch.Tensor] = []
    model.get_submodule(name).register_forward_pre_hook(lambda _, x: seen.append(x[0]))
    for text in TEXTS:
        model(torch.tensor([text]))
    largest = torch.cat(seen, 1)[0].abs().amax(0)
    weight = checkpoint.read(f"{name}.weight")
    wanted = (largest / weight.abs().amax(0)).sqrt()
    ratio = changed.read(f"{name}.weight") / weight
    torch.testing.assert_close(ratio, wanted.expand_as(ratio), rtol=1e-3, atol=1e-5)
    up = "model.layers.0.mlp.up_proj.weight"
    columns = changed.read(up) * wanted[:, None] / checkpoint.read(up)  # the norm's factors alone
    torch.testing.assert_close(columns, columns[:1].expand_as(columns), rtol=1e-3, atol=1e-5)


def test_reads_of_rows(pair: tuple[InMemory, Smoothed]) -> None:
    changed, name = pair[1], "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(changed.read_rows(name, 3, 9), changed.read(name)[3:9])
    with pytest.raises(CetaneError, match="no rows"):
        changed.read_rows(name, 3, 900)


def test_other_tensors_and_identity(pair: tuple[InMemory, Smoothed]) -> None:
    checkpoint, changed = pair
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        assert torch.equal(changed.read(name), checkpoint.read(name))
    assert changed.fingerprint != checkpoint.fingerprint


def test_adapters_stay_with_a_wrapped_checkpoint(pair: tuple[InMemory, Smoothed]) -> None:
    checkpoint = InMemory(build_model("llama"))
    merged: Any = ("an adapter",)
    checkpoint.merged = merged
    assert Smoothed(checkpoint).merged == merged


def test_other_families() -> None:
    checkpoint = InMemory(build_gemma3())
    plan = Planner(checkpoint, tiny_recipe()).plan()
    with pytest.raises(CetaneError, match=r"nothing to exchange in .* of a gemma3_text"):
        smoothing_planner(checkpoint, plan, Path("here"))


@pytest.mark.parametrize("words", ["turned channels", "heads that stream", "adapters"])
def test_bundles_that_cannot_be_smoothed(words: str) -> None:
    checkpoint: Any = InMemory(build_model("llama"))
    plan = Planner(checkpoint, tiny_recipe()).plan()
    recipe = plan.recipe
    if words == "adapters":
        checkpoint.adapters = {"a": None}
    elif words == "turned channels":
        compression = recipe.compression.model_copy(update={"rotate": True})
        recipe = recipe.model_copy(update={"compression": compression})
    else:
        cache = recipe.cache.model_copy(update={"streaming": Streaming.model_construct()})
        recipe = recipe.model_copy(update={"cache": cache})
    changed = plan.model_copy(update={"recipe": recipe})
    with pytest.raises(CetaneError, match=f"here has {words}, which smoothing does not know"):
        smoothing_planner(checkpoint, changed, Path("here"))
