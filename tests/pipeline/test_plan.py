"""A ranking recommends nothing that a rule or the golden gate refuses."""

import shutil
from pathlib import Path

import pytest
from tests.pipeline.test_chip_layout import QWEN3

from cetane.checkpoint import open_checkpoint
from cetane.errors import CetaneError
from cetane.gates.residency import audit
from cetane.gates.residency.target import Target
from cetane.lab import synthetic
from cetane.perf.combinations import RANKED_FORMATS
from cetane.pipeline.compression_choice import known_to_hold, resolve_recipe
from cetane.pipeline.plan import PlannedResidency, forecast, plan, planner_for, rank
from cetane.pipeline.request import Request, make_request
from cetane.planner import Planner
from cetane.schema.changes import override
from cetane.schema.recipe import load_recipe


@pytest.fixture
def request_of_tiny(
    tiny_checkpoint_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Request:
    """A tiny model that counts as a large one: rules about its size are not asked."""
    monkeypatch.setenv("CETANE_CACHE", str(tmp_path / "cache"))
    rules = {n: r for n, r in audit.load_rules().items() if n != "tiny-program"}
    monkeypatch.setattr(audit, "load_rules", lambda: rules)
    recipe = override(load_recipe("default"), {"cache.context": 256, "tokens.prefill": 8})
    return Request(open_checkpoint(tiny_checkpoint_folder), recipe)


def test_what_was_not_judged_is_not_recommended(request_of_tiny: Request) -> None:
    fastest = rank(request_of_tiny, Target("a19-pro")).fastest
    assert fastest is not None and fastest.format == "fp16"
    resolve_recipe(request_of_tiny.checkpoint, request_of_tiny.recipe)
    judged = rank(request_of_tiny, Target("a19-pro")).fastest
    assert judged is not None and judged.format == "palette6-kmeans-group32"
    assert judged.decode.ms <= fastest.decode.ms


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_few_bits_are_ranked_among_formats_that_need_no_fitting(
    bits: int, request_of_tiny: Request, tiny_checkpoint_folder: Path
) -> None:
    few = make_request(tiny_checkpoint_folder, request_of_tiny.recipe, bits=bits)
    assert known_to_hold(few.checkpoint, few.recipe, RANKED_FORMATS) == {"fp16"}
    turned = override(request_of_tiny.recipe, {"compression.rotate": True})
    judged = resolve_recipe(few.checkpoint, turned).compression.default
    assert known_to_hold(few.checkpoint, few.recipe, RANKED_FORMATS) == {"fp16", judged}


def test_what_a_rule_refuses_is_not_recommended(request_of_tiny: Request) -> None:
    """Prefill of 8 tokens in a cache that the graph blends fails on a phone, not on a Mac."""
    ranking = rank(request_of_tiny, Target("a19-pro"))
    refused = [c for c in ranking.combinations if c.refused and "matmul-scatter" in c.refused]
    assert all(c.contract == "blend" for c in refused)
    assert ranking.fastest is not None and ranking.fastest.contract != "blend"
    assert all(one.refused is None for one in ranking.held)


def test_the_contract_is_the_one_that_a_plan_takes(request_of_tiny: Request) -> None:
    """Caches in states are predicted to be faster on a phone, but rules speak against them."""
    target = Target("a19-pro")
    ranking = rank(request_of_tiny, target)
    faster = min(c.decode.ms for c in ranking.held if c.contract == "stateful")
    assert ranking.fastest is not None and ranking.fastest.decode.ms > faster
    assert ranking.fastest.contract == planner_for(request_of_tiny, target).recipe.cache.contract


def test_what_a_rule_refuses_is_told_before_a_port(
    request_of_tiny: Request, tiny_checkpoint_folder: Path
) -> None:
    """Graphs with 4-bit weights per block leave the ANE."""
    target, key = Target("m4-max"), "compression.default"
    for form, mend in (("fp16", None), ("int4-per-block32", "palette4-kmeans-group32")):
        request = make_request(tiny_checkpoint_folder, request_of_tiny.recipe, changes={key: form})
        residency = PlannedResidency(planner_for(request, target), target)
        told = residency.as_json()
        assert told["passed"] is (mend is None) and told["basis"] == "predicted"
        assert ("int4-per-block" in told["findings"]) is (mend is not None)
        assert (told["explanation"] or {"changes": {key: None}})["changes"] == {key: mend}


def test_a_plan_refuses_a_recipe_whose_files_are_gone(
    tiny_checkpoint_folder: Path, tmp_path: Path
) -> None:
    gone = {"file": str(tmp_path / "gone.safetensors"), "sha256": "0" * 64}
    for changes in (
        {"compression.default": "palette4-weighted-group8", "compression.sensitivity": gone},
        {"compression.default": "palette4-kmeans-group8", "compression.method": "gptq",
         "compression.fitted": gone},
    ):  # fmt: skip
        with pytest.raises(CetaneError, match=r"compression\.\w+: cannot read .*gone"):
            plan(tiny_checkpoint_folder, changes=changes)


@pytest.fixture
def more_tokens(tiny_checkpoint_folder: Path, tmp_path: Path) -> Path:
    """The tiny model, whose tokenizer has one token more."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint_folder, folder)
    (folder / "added_tokens.json").write_text('{"<x>": 288}')
    return folder


@pytest.mark.parametrize("template", ["{{ messages[0].content }}", "{{ 1 / 0 }}<x>", None])
def test_a_token_of_no_use_is_no_obstacle(template: str | None, more_tokens: Path) -> None:
    (more_tokens / "chat_template.jinja").unlink()
    if template is not None:
        (more_tokens / "chat_template.jinja").write_text(template)
    assert plan(more_tokens)


def test_a_template_with_a_token_that_the_model_lacks(more_tokens: Path) -> None:
    (more_tokens / "chat_template.jinja").write_text("<x>{{ messages[0].content }}")
    message = "the tokenizer has '<x>' as token 288, but the model has only 288 tokens"
    with pytest.raises(CetaneError, match=message) as caught:
        plan(more_tokens)
    assert "resize_token_embeddings" in str(caught.value.hint)


def test_an_older_system_holds_nothing(request_of_tiny: Request) -> None:
    """It loads no program of this recipe, which is for iOS 18."""
    ranking = rank(request_of_tiny, Target("a19-pro", 17.0))
    assert ranking.fastest is None
    assert any("newer-system" in c.refused for c in ranking.combinations if c.refused)


def test_a_context_that_nobody_asked_for_refuses_nothing() -> None:
    """States of 64 heads hold 512 and 2048 tokens, but 8192 are more than a tensor's elements."""
    config = QWEN3 | {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8, "head_dim": 64,
        "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 512,
    }  # fmt: skip
    padded = {"cache.contract": "stateful", "cache.padded": True, "cache.state_heads": 64,
              "layout.kind": "single"}  # fmt: skip

    def contexts(context: int) -> set[int]:
        recipe = override(load_recipe("default"), padded | {"cache.context": context})
        told = forecast(Planner(synthetic.Shapes("qwen3", config), recipe), "m4-max")
        return {prediction.context for prediction in told.predictions}

    assert contexts(512) == {512, 2048}
    with pytest.raises(CetaneError, match="268,435,456 elements"):
        contexts(8192)
