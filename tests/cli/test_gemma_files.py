"""Gemma 3 as it is released, through the commands that everything goes through: a GGUF file, a
model that sees, and activations that fp16 cannot hold."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from tests.cli.conftest import Cetane
from tests.conftest import build_tokenizer
from tests.families.gemma_models import FULL, SLIDING, build_gemma3
from tests.gemma_gguf import TOKENS, TURNS, write_gemma3

from cetane.bundle import Bundle

RECIPE = """
[layout]
kind = "{layout}"
[cache]
context = 64
[tokens]
verify = 0
prefill = 8
[family]
residual_scale = {scale}
"""
MODEL: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": [SLIDING] * 5 + [FULL],
    "sliding_window": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 16,
    "final_logit_softcapping": None,
    "vocab_size": len(TOKENS),
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
"""One key/value head, one full layer in six, heads wider than hidden / heads."""


@pytest.fixture
def recipe_of(tmp_path: Path) -> Callable[..., Path]:
    def write(scale: float, layout: str = "per-block") -> Path:
        file = tmp_path / f"gemma-{scale:g}-{layout}.toml"
        file.write_text(RECIPE.format(scale=scale, layout=layout))
        return file

    return write


@pytest.mark.parametrize("kind", [Kind.F16, Kind.Q4_0])
def test_inspect_and_plan(
    cetane: Cetane, tmp_path: Path, recipe_of: Callable[..., Path], kind: Kind
) -> None:
    path = write_gemma3(tmp_path / "m.gguf", build_gemma3(**MODEL), kind)
    assert cetane("inspect", path, "--json").json["config"]["model_type"] == "gemma3_text"
    planned = cetane("plan", path, "-r", recipe_of(1), "--json").json
    assert planned["caches"]["sliding"]["count"] == 32


def test_a_gguf_file(cetane: Cetane, tmp_path: Path, recipe_of: Callable[..., Path]) -> None:
    """Ported, judged and asked; the template's BOS comes once, and an end of turn ends."""
    path = write_gemma3(tmp_path / "m.gguf", build_gemma3(**MODEL), Kind.Q8_0)
    bundle = tmp_path / "bundle"
    ported = cetane("port", path, "-r", recipe_of(1 / 32), "-o", bundle, "--json")
    assert ported.code == 0, [
        check for check in ported.json["gates"]["golden"]["checks"] if not check["passed"]
    ]
    assert cetane("validate", bundle, "--json").json["golden"]["passed"]
    tokenizer = Bundle(bundle).tokenizer
    assert tokenizer.eos_ids == (1, TOKENS.index("<end_of_turn>"))
    asked = tokenizer.chat([{"role": "user", "content": "a fuel"}])
    assert asked[:2] == [TOKENS.index("<bos>"), TOKENS.index(TURNS[0])]
    assert asked.count(TOKENS.index("<bos>")) == 1
    assert tokenizer.encode("a fuel")[0] == TOKENS.index("<bos>")
    said = cetane("run", bundle, "--chat", "--max-new", "4", stdin="a fuel\n")
    assert said.code == 0, said.err


def test_a_model_that_sees(cetane: Cetane, tmp_path: Path, recipe_of: Callable[..., Path]) -> None:
    text = build_gemma3(**MODEL | {"vocab_size": 288, "num_hidden_layers": 2,
                                   "layer_types": [SLIDING, FULL]})  # fmt: skip
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=text.config, vision_config=vision, mm_tokens_per_image=4, image_token_index=287
    )
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.tie_weights()
    model.save_pretrained(tmp_path / "gemma")
    build_tokenizer().save_pretrained(tmp_path / "gemma")
    bundle = tmp_path / "bundle"
    arguments = (tmp_path / "gemma", "-r", recipe_of(1), "-o", bundle, "--json")
    assert cetane("port", *arguments).json["gates"]["golden"]["passed"]


def loud(folder: Path) -> Path:
    """A model whose residual stream outgrows fp16, as those of released ones do."""
    model = build_gemma3(num_hidden_layers=2, layer_types=[SLIDING, FULL], vocab_size=288)
    with torch.no_grad():
        for layer in model.model.layers:
            for norm in (layer.post_attention_layernorm, layer.post_feedforward_layernorm):
                norm.weight.copy_((norm.weight + 1) * 30000 - 1)
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def test_activations_that_fp16_cannot_hold(
    cetane: Cetane, tmp_path: Path, recipe_of: Callable[..., Path]
) -> None:
    """Red as they are, green with a residual stream that is a 32nd, and green with no option."""
    model = loud(tmp_path / "loud")
    refused = cetane("port", model, "-r", recipe_of(1, "single"), "-o", tmp_path / "a", "--json")
    assert refused.code == 1
    assert not refused.json["gates"]["golden"]["passed"]
    why = refused.json["explanation"]
    assert why["cause"] == "fp16 range" and "residual_scale" in why["recipe_change"]
    cetane("build", model, "-r", recipe_of(1, "single"), "-o", tmp_path / "b", "--json")
    red = cetane("validate", tmp_path / "b")
    assert red.code == 1
    assert "the residual stream reaches" in red.err
    assert "family.residual_scale is 1 and can be smaller" in red.err
    ported = cetane(
        "port", model, "-r", recipe_of(1 / 32, "single"), "-o", tmp_path / "c", "--json"
    )
    assert ported.code == 0, ported.json["gates"]
    golden = ported.json["gates"]["golden"]
    assert golden["warnings"] == []
    assert 1000 < max(block["largest"] for block in golden["ranges"]) < 32752
    plain = tmp_path / "plain.toml"
    plain.write_text(RECIPE.partition("[family]")[0].format(layout="single"))
    ported = cetane("port", model, "-r", plain, "-o", tmp_path / "d", "--json")
    assert ported.code == 0, ported.json["gates"]
    golden = ported.json["gates"]["golden"]
    assert golden["warnings"] == []
    assert 1000 < max(block["largest"] for block in golden["ranges"]) < 32752
    assert Bundle(tmp_path / "d").plan.recipe.family == {"residual_scale": 2.0**-4}


def test_no_scale_that_is_none(cetane: Cetane, tmp_path: Path) -> None:
    path = write_gemma3(tmp_path / "m.gguf", build_gemma3(**MODEL), Kind.F16)
    (tmp_path / "bad.toml").write_text(RECIPE.format(scale=0, layout="single"))
    assert "residual_scale" in cetane("plan", path, "-r", tmp_path / "bad.toml").error
