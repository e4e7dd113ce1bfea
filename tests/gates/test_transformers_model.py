"""transformers reads a GGUF without asking for the same names again and again, and the config of a
folder as it is."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from tests.checkpoint.conftest import build_variant
from tests.conftest import TINY, build_model
from tests.gguf_files import write_gguf
from tests.quantized_folders import SAID, save_quantized

from cetane.checkpoint import open_checkpoint
from cetane.checkpoint.safetensors import SafetensorsCheckpoint
from cetane.errors import CetaneError
from cetane.gates.reference import Reference
from cetane.gates.transformers_model import config_of, one_name_map


def test_names_of_gguf_are_mapped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    monkeypatch.setattr(gguf, "get_tensor_name_map", lambda *named: made.append(named))
    with one_name_map():
        for layers in (2, 2, 3):
            gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    assert made == [(gguf.MODEL_ARCH.LLAMA, 2), (gguf.MODEL_ARCH.LLAMA, 3)]


def test_groups_of_a_falcon_that_transformers_leaves_as_they_are(tmp_path: Path) -> None:
    """A GGUF file has all queries, then all keys. transformers takes them for groups of heads."""
    model = build_variant("falcon-groups")
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", "falcon", model))
    reference = Reference(checkpoint)
    assert reference.loader == "cetane"
    ids = torch.arange(10)[None]
    with torch.no_grad():
        torch.testing.assert_close(reference.model(ids).logits, model(ids).logits)


def test_the_config_is_what_transformers_reads(tmp_path: Path) -> None:
    """cetane's own reading of it decides nothing, but its limits hold."""
    model = build_model("llama", rms_norm_eps=0.01)
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    right = checkpoint.config
    checkpoint.config = right | {"rms_norm_eps": 0.5}
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert config_of(checkpoint).rms_norm_eps == theirs.rms_norm_eps == 0.01
    checkpoint.config = right | {"num_hidden_layers": 10**9}
    with pytest.raises(CetaneError, match="num_hidden_layers"):
        config_of(checkpoint)


@pytest.mark.parametrize("said", [{}, {"tie_word_embeddings": False}])
@pytest.mark.parametrize("kind", ["gemma3", "llama4", "mistral3", "qwen3_5"])
def test_the_config_of_a_text_part(tmp_path: Path, kind: str, said: dict[str, bool]) -> None:
    """Other parts are not read: cetane checks no sizes of theirs."""
    save_file({"model.language_model.norm.weight": torch.ones(4)}, tmp_path / "model.safetensors")
    text = TINY | ({"model_type": "mistral"} if kind == "mistral3" else {})
    content = {"model_type": kind, "text_config": text} | said
    (tmp_path / "config.json").write_text(json.dumps(content))
    whole = transformers.AutoConfig.from_pretrained(tmp_path)
    hostile = {"vision_config": {"model_type": "none such"}, "num_labels": 10**12}
    (tmp_path / "config.json").write_text(json.dumps(content | hostile))
    config = config_of(open_checkpoint(tmp_path))
    assert config.tie_word_embeddings == whole.tie_word_embeddings
    assert {**config.to_dict(), "tie_word_embeddings": None} == {
        **whole.text_config.to_dict(), "tie_word_embeddings": None
    }  # fmt: skip


def test_a_model_of_the_hub(tmp_path: Path) -> None:
    """Its folder lies in the hub's cache: transformers reads its config and weights too."""
    build_model("llama", rms_norm_eps=0.01).save_pretrained(tmp_path)
    checkpoint = SafetensorsCheckpoint.open(tmp_path, source="org/name")
    checkpoint.config = checkpoint.config | {"rms_norm_eps": 0.5}
    assert config_of(checkpoint).rms_norm_eps == 0.01
    assert Reference(checkpoint).loader == "transformers"
    one_file = SafetensorsCheckpoint.open(tmp_path, weights=tmp_path / "model.safetensors")
    assert Reference(one_file).loader == "cetane"  # the folder may hold other weights


@pytest.mark.parametrize("kind", SAID)
def test_quantized_weights_have_their_scales(kind: str, tmp_path: Path) -> None:
    """Without a quantisation in its config, transformers would take the integers for weights."""
    model, tokens = build_model(), [5, 250, 17, 3]
    save_quantized(kind, model, tmp_path)
    (seen,) = Reference(open_checkpoint(tmp_path)).run([tokens])
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0].numpy()
    np.testing.assert_allclose(seen.logits, expected, atol=1e-4)
