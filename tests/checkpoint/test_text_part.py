"""Checkpoints of models that see, in every form they are released in: only their text is ported."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.conftest import TINY, build_model
from tests.families.gemma_models import (
    build_gemma3,
    build_gemma3n,
    build_gemma4,
    build_gemma4_unified,
    recipe,
)
from tests.families.parity import TOLERANCE, run, tokens, truth

from cetane.checkpoint import Checkpoint, open_checkpoint
from cetane.engine.authored import authored_engine
from cetane.errors import CetaneError
from cetane.gates.reference import Reference
from cetane.pipeline.inspect import inspect
from cetane.planner import Planner

VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def logits(path: Path, length: int) -> np.ndarray:
    checkpoint = open_checkpoint(path)
    return run(authored_engine(Planner(checkpoint, recipe()), checkpoint), [length])


def seeing(folder: Path) -> np.ndarray:
    """A Gemma 3 that sees, as transformers writes it; returns its logits for a text."""
    text = build_gemma3(final_logit_softcapping=None)
    config = transformers.Gemma3Config(
        text_config=text.config, vision_config=VISION, mm_tokens_per_image=4, image_token_index=287
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.tie_weights()
    model.save_pretrained(folder)
    ids = torch.tensor([tokens(287, 48)])
    with torch.inference_mode():
        found = model(input_ids=ids).logits[0].numpy()
    assert np.abs(found).max() > 0.1
    return found


def test_a_model_that_sees(tmp_path: Path) -> None:
    expected = seeing(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config["model_type"] == "gemma3_text"
    assert all(name.startswith("model.") for name in checkpoint.names())
    assert not any("vision" in name for name in checkpoint.names())
    engine = authored_engine(Planner(checkpoint, recipe()), checkpoint)
    found = engine.session().feed(tokens(287, 48), "all")
    assert found is not None
    assert np.abs(found - expected).max() <= TOLERANCE


def test_a_softcap_that_the_whole_model_ignores_is_refused(tmp_path: Path) -> None:
    seen = seeing(tmp_path)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    content["text_config"]["final_logit_softcapping"] = 0.05
    path.write_text(json.dumps(content))
    model = transformers.Gemma3ForConditionalGeneration.from_pretrained(tmp_path).eval()
    with torch.inference_mode():
        found = model(input_ids=torch.tensor([tokens(287, 48)])).logits[0].numpy()
    assert np.array_equal(found, seen), "transformers applies it now: so can cetane"
    with pytest.raises(CetaneError, match=r"final_logit_softcapping is 0\.05: .* ignores it"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
@pytest.mark.parametrize(
    "kind", ["fast_vlm", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "perception_lm"]
)
def test_names_of_released_checkpoints(tmp_path: Path, kind: str, prefix: str) -> None:
    others = {
        "fast_vlm": lambda: build_model("qwen2", tie_word_embeddings=True),
        "gemma3n": build_gemma3n,
        "gemma4": build_gemma4,
        "gemma4_unified": build_gemma4_unified,
        "perception_lm": lambda: build_model("llama", tie_word_embeddings=True),
    }
    model = others[kind]() if kind in others else build_gemma3(final_logit_softcapping=None)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    renamed = {prefix + name.removeprefix("model."): t for name, t in stored.items()}
    renamed["vision_tower.patch.weight"] = torch.zeros(2)
    save_file(renamed, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    whole = {"model_type": kind, "text_config": config, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert np.abs(logits(tmp_path, 48) - truth(model, 48)).max() <= TOLERANCE


@pytest.mark.parametrize(("outer", "said"), [(True, True), (True, False), (False, True)])
def test_the_whole_models_config_ties_the_head(tmp_path: Path, outer: bool, said: bool) -> None:
    """If it does not say, the head of these kinds is tied."""
    text = dict(build_gemma3(final_logit_softcapping=None).config.to_dict())
    config = transformers.Gemma3Config(
        text_config=text | {"tie_word_embeddings": not outer}, tie_word_embeddings=outer,
        vision_config=VISION, mm_tokens_per_image=4, image_token_index=287,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    if not said:
        leave_out_tie(tmp_path)
        assert transformers.AutoConfig.from_pretrained(tmp_path).tie_word_embeddings == outer
    checkpoint = open_checkpoint(tmp_path)
    assert ("lm_head.weight" in checkpoint) == (not outer)
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([tokens(288, 32)])).logits[0].numpy()
    assert np.abs(expected).max() > 0.1
    assert np.abs(logits(tmp_path, 32) - expected).max() <= TOLERANCE


ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
QWEN_VISION = {"depth": 1, "num_heads": 2, "hidden_size": 16, "intermediate_size": 16}
SEEING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "idefics3": ({"model_type": "llama"}, VISION),
    "internvl": (
        {"model_type": "qwen2"}, VISION | {"image_size": [28, 28], "patch_size": [14, 14]}
    ),
    "lfm2_vl": (
        {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
        VISION | {"model_type": "siglip2_vision_model"},
    ),
    "llava": ({"model_type": "llama"}, VISION | {"model_type": "clip_vision_model"}),
    "qwen2_vl": (
        {"rope_parameters": ROPE},
        {"depth": 1, "embed_dim": 16, "hidden_size": 64, "num_heads": 2},
    ),
    "qwen2_5_vl": ({"rope_parameters": ROPE}, QWEN_VISION | {"out_hidden_size": 64}),
    "qwen3_vl": (
        {"rope_parameters": ROPE | {"mrope_interleaved": True}},
        QWEN_VISION | {"out_hidden_size": 64, "deepstack_visual_indexes": [0]},
    ),
    "smolvlm": ({"model_type": "llama"}, VISION),
}  # fmt: skip
"""Keys of the text part, and those of the rest, of models that see."""


def save_seeing(folder: Path, kind: str, **config: Any) -> np.ndarray:
    """Write a random model that sees, as transformers does; returns its logits for a text."""
    text, vision = SEEING[kind]
    return save_whole(folder, kind, text_config=TINY | text, vision_config=vision, **config)


@torch.no_grad()
def save_whole(folder: Path, kind: str, **config: Any) -> np.ndarray:
    """Write a random model of any kind; the text has none of the tokens of pictures and sounds."""
    settings = transformers.AutoConfig.for_model(kind, **config)
    torch.manual_seed(0)
    model = transformers.AutoModelForMultimodalLM.from_config(settings).float().eval()
    for parameter in model.parameters():
        parameter += torch.randn_like(parameter) * 0.1
    model.save_pretrained(folder)
    found: np.ndarray = model(input_ids=torch.tensor([tokens(280)])).logits[0].numpy()
    assert np.abs(found).max() > 0.1
    return found


def leave_out_tie(folder: Path) -> None:
    """Let config.json not say whether the head is tied."""
    path = folder / "config.json"
    written = json.loads(path.read_text())
    written.pop("tie_word_embeddings", None)
    path.write_text(json.dumps(written))


def assert_text(checkpoint: Checkpoint, expected: np.ndarray) -> None:
    """The port's logits and the gates' reference are the whole model's."""
    ids, engine = tokens(280), authored_engine(Planner(checkpoint, recipe()), checkpoint)
    found = engine.session().feed(ids, "all")
    assert found is not None
    assert np.abs(found - expected).max() <= TOLERANCE
    logits = Reference(checkpoint).run([ids])[0].logits
    assert np.abs(logits - expected).max() <= TOLERANCE


@pytest.mark.parametrize("tied", [True, False, None])
@pytest.mark.parametrize("kind", SEEING)
def test_the_text_part_of_a_model_that_sees(kind: str, tied: bool | None, tmp_path: Path) -> None:
    said = {} if tied is None else {"tie_word_embeddings": tied}
    expected = save_seeing(tmp_path, kind, **said)
    if tied is None:
        leave_out_tie(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.part_of == kind
    assert_text(checkpoint, expected)


TOWER = VISION | {
    "embed_dim": 16, "depth": 1, "num_heads": 2, "d_model": 16, "encoder_layers": 1,
    "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "num_key_value_heads": 2, "head_dim": 8,
    "out_hidden_size": 64, "num_mel_bins": 16, "num_layers": 1, "hidden_dim": 16,
    "output_channels": 16, "global_attn_indexes": [0], "encoder_hidden_size": 16,
}  # fmt: skip
"""Small sizes of what sees or hears, by the names that configs have for them."""
OTHERS: dict[str, dict[str, Any]] = {
    "aya_vision": {"logit_scale": 1.0},
    "cohere2_vision": {"logit_scale": 1.0},
    "deepseek_vl": {},
    "exaone4_5": {},
    "glmasr": {},
    "got_ocr2": {},
    "granite_speech": {"embedding_multiplier": 3.0},
    "idefics2": {},
    "lfm3_vl": {"layer_types": ["conv", "full_attention"]},
    "lighton_ocr": {},
    "llava_next": {},
    "llava_next_video": {},
    "llava_onevision": {},
    "minicpmv4_6": {"layer_types": ["linear_attention", "full_attention"]},
    "ovis2": {},
    "qwen2_audio": {},
    "qwen3_asr": {},
    "video_llama_3": {},
    "video_llava": {},
    "vipllava": {},
    "voxtral": {},
}
"""Keys of the text part of other models that see or hear. transformers' whole models leave out the
factor on logits that a Cohere and a Granite have; no greedy token depends on it."""


def smaller(config: Any) -> dict[str, Any]:
    """A config of what sees or hears, with small sizes."""
    own = config.to_dict()
    small = {key: value for key, value in TOWER.items() if key in own}
    for key in ("image_size", "patch_size"):
        if isinstance(own.get(key), list | tuple):
            small[key] = [TOWER[key]] * 2
    return small | {"model_type": own["model_type"]}


@pytest.mark.parametrize("kind", OTHERS)
def test_the_text_part_of_others(kind: str, tmp_path: Path) -> None:
    """Their heads are tied as transformers does if no config says it."""
    whole = transformers.AutoConfig.for_model(kind)
    towers = {name: smaller(getattr(whole, name)) for name in whole.sub_configs}
    text = TINY | OTHERS[kind] | {"model_type": towers.pop("text_config")["model_type"]}
    text.pop("tie_word_embeddings", None)
    expected = save_whole(tmp_path, kind, text_config=text, **towers)
    leave_out_tie(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.part_of == kind
    assert_text(checkpoint, expected)


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
def test_a_flat_config(kind: str, tmp_path: Path) -> None:
    """The form in which these models were released."""
    expected = save_seeing(tmp_path, kind)
    stored = load_file(tmp_path / "model.safetensors")
    renamed = {
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): tensor
        for name, tensor in stored.items()
    }
    save_file(renamed, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    text = config.pop("text_config")
    text["rope_scaling"] = {"type": "mrope", "mrope_section": ROPE["mrope_section"]}
    text["rope_theta"] = text.pop("rope_parameters")["rope_theta"]
    (tmp_path / "config.json").write_text(json.dumps(text | config))
    assert inspect(tmp_path)["part_of"] == kind
    checkpoint = open_checkpoint(tmp_path)
    assert not any("visual" in name for name in checkpoint.names())
    assert_text(checkpoint, expected)


@pytest.mark.parametrize(
    "text",
    [
        {}, {"model_type": "mistral"}, {"model_type": "ministral3"},
        {"model_type": "mistral", "num_hidden_layers": 1, "layer_types": ["full_attention"]},
    ],
)  # fmt: skip
def test_the_type_of_mistral_3s_text_part_is_what_its_config_says(
    tmp_path: Path, text: dict[str, Any]
) -> None:
    """Of no type, it is a Mistral, which has no yarn."""
    save_file({"model.language_model.norm.weight": torch.ones(4)}, tmp_path / "model.safetensors")
    config = {"model_type": "mistral3", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = transformers.Mistral3Config(text_config=text).text_config.model_type
    assert open_checkpoint(tmp_path).config["model_type"] == expected


def test_two_names_of_one_tensor(tmp_path: Path) -> None:
    names = "model.language_model.norm.weight", "language_model.model.norm.weight"
    save_file({name: torch.ones(4) for name in names}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "gemma3", "text_config": {}}')
    with pytest.raises(CetaneError, match="one tensor of the text"):
        open_checkpoint(tmp_path)


def test_a_text_config_that_is_none(tmp_path: Path) -> None:
    save_file({"model.norm.weight": torch.ones(4)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "gemma3", "text_config": 3}')
    with pytest.raises(CetaneError, match="text_config is not an object"):
        open_checkpoint(tmp_path)


def test_gguf(
    tmp_path: Path, tiny_model: Callable[..., Any], write_gguf: Callable[..., Path]
) -> None:
    """Gains are stored as they are there, and less one in safetensors."""
    model = tiny_model("gemma3")
    path = write_gguf(tmp_path / "m.gguf", "gemma3", model)
    assert np.abs(logits(path, 48) - truth(model, 48)).max() <= TOLERANCE
