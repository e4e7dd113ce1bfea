"""GGUF files against the transformers models they were written from."""

import math
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from cetane.checkpoint import open_checkpoint
from cetane.errors import CetaneError

ALL = [
    "afmoe", "apertus", "arcee", "bamba", "cohere", "cohere-norms", "cohere2", "deepseek2",
    "deepseek2-queries", "deepseek3", "dots1", "ernie", "ernie-moe", "exaone", "exaone4",
    "exaone4-full", "exaone-moe", "falcon", "falcon-groups", "falcon-h1", "gemma", "gemma2",
    "gemma3", "gemma3n", "gemma4", "glm", "glm4", "glm4moe", "glm4moe-air", "gpt-oss", "gpt2",
    "gptneox", "granite", "granite-swa", "granite-swa-experts", "granitehybrid",
    "granitehybrid-experts", "granitemoe", "granitemoe-shared", "hunyuan", "hunyuan-moe", "jais2",
    "lfm2", "lfm2moe", "llama", "llama-bias", "llama-tied", "llama4", "mamba2", "mellum",
    "minicpm3", "minimax", "mistral3", "mistral3-no-temperature", "mistral3-plain-yarn", "mixtral",
    "nemotron", "nemotron-h", "nemotron-h-moe", "olmo", "olmo2", "olmo3", "olmo3-bases", "olmoe",
    "phi2", "phi3", "phi3-longrope", "phimoe", "phimoe-longrope", "qwen2", "qwen2-yarn", "qwen2moe",
    "qwen3", "qwen35", "qwen35moe", "qwen3moe", "qwen3next", "seed", "smollm3", "stablelm",
    "stablelm-parallel", "starcoder", "starcoder2",
]  # fmt: skip


@pytest.mark.parametrize("variant", ALL)
def test_tensors_and_config_rebuild_the_model(
    variant: str, tmp_path: Path, tiny_model: Any, write_gguf: Any
) -> None:
    model = tiny_model(variant)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", variant, model))

    expected = model.state_dict()
    tied = checkpoint.config["tie_word_embeddings"]
    assert tied == model.config.tie_word_embeddings
    assert checkpoint.names() == sorted(set(expected) - ({"lm_head.weight"} if tied else set()))
    for name in checkpoint.names():
        tensor = checkpoint.read(name)
        assert tensor.dtype == torch.float32 and checkpoint.dtype(name) == "F32"
        assert tuple(tensor.shape) == checkpoint.shape(name)
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)

    # The config is right when a model made from it computes the same, past any sliding window.
    config = transformers.AutoConfig.for_model(**checkpoint.config)
    rebuilt = transformers.AutoModelForCausalLM.from_config(config).eval()
    weights = {name: checkpoint.read(name) for name in checkpoint.names()}
    assert set(rebuilt.load_state_dict(weights, strict=False)[0]) <= {"lm_head.weight"}
    ids = torch.arange(40)[None] % 64
    with torch.no_grad():
        torch.testing.assert_close(rebuilt(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


def test_the_attention_factor_of_an_olmo3_is_transformers_own(
    tmp_path: Path, tiny_model: Any, write_gguf: Any
) -> None:
    model = tiny_model("olmo3")
    _, factor = ROPE_INIT_FUNCTIONS["yarn"](model.config, "cpu", layer_type="full_attention")
    assert factor > 1.1
    plain = open_checkpoint(write_gguf(tmp_path / "p.gguf", "olmo3", model))

    def written(value: float) -> Path:
        extra = lambda w: w.add_rope_scaling_attn_factors(value)  # noqa: E731
        path: Path = write_gguf(tmp_path / "m.gguf", "olmo3", model, extra=extra)
        return path

    assert open_checkpoint(written(factor)).config == plain.config
    with pytest.raises(CetaneError, match=r"attn_factor is not 1\.13863") as caught:
        open_checkpoint(written(factor + 0.01))
    assert "safetensors" in str(caught.value.hint)


@pytest.mark.parametrize("variant", ["llama", "gemma3"])
def test_config_agrees_with_transformers_own_gguf_reader(
    variant: str, tmp_path: Path, tiny_model: Any, write_gguf: Any
) -> None:
    path = write_gguf(tmp_path / "m.gguf", variant, tiny_model(variant))
    config = open_checkpoint(path).config
    theirs = transformers.AutoConfig.from_pretrained(tmp_path, gguf_file="m.gguf").to_dict()
    different = {"architectures", "rope_parameters", "vocab_size"}  # compared by their effect above
    different |= {"attention_bias", "query_pre_attn_scalar"}  # theirs are the class's defaults
    for field in config.keys() - different:
        assert config[field] == theirs[field], field


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_1, Kind.Q5_0])
def test_quantised_tensors(
    kind: Kind, tmp_path: Path, tiny_model: Any, write_gguf: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "cetane.checkpoint.gguf.checkpoint._CHUNK", 100
    )  # three rows of 32 at a time
    model = tiny_model("qwen3")
    # 48 columns do not divide into blocks of 32
    monkeypatch.setattr(model.config, "intermediate_size", 64)
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.data = torch.randn(32, 64)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", "qwen3", model, quantization=kind))
    for name, weight in model.state_dict().items():
        if weight.ndim == 2:
            packed = gguf.quants.quantize(weight.numpy(), kind)
            expected = gguf.quants.dequantize(packed, kind)
            assert checkpoint.dtype(name) == kind.name
            np.testing.assert_array_equal(checkpoint.read(name).numpy(), expected)


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0])
@pytest.mark.parametrize(
    "variant", ["falcon-groups", "gemma3n", "glm4moe", "granite-swa-experts", "nemotron-h-moe"]
)
def test_quantised_tensors_that_a_file_keeps_otherwise(
    variant: str, kind: Kind, tmp_path: Path, tiny_model: Any, write_gguf: Any
) -> None:
    """The rows of all of them stay rows, so each has the blocks of Hugging Face's row."""
    model = tiny_model(variant)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", variant, model, quantization=kind))
    changed = 0
    for name in checkpoint.names():
        expected = model.state_dict()[name].numpy()
        if expected.ndim > 1 and expected.shape[-1] % 32 == 0:
            expected = gguf.quants.dequantize(gguf.quants.quantize(expected, kind), kind)
            changed += 1
        np.testing.assert_allclose(checkpoint.read(name).numpy(), expected, rtol=0, atol=1e-6)
    assert changed >= 10


def test_llama3_rope_scaling_is_recovered(tmp_path: Path, tiny_model: Any, write_gguf: Any) -> None:
    def with_factors(factors: np.ndarray) -> Callable[[gguf.GGUFWriter], None]:
        factors = factors.astype(np.float32)
        return lambda writer: writer.add_tensor("rope_freqs.weight", factors)

    scaling = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    # llama.cpp stores by how much each frequency is divided; transformers knows the quotients.
    config = transformers.LlamaConfig(head_dim=8, rope_parameters=scaling)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    factors = 5e5 ** -(np.arange(0, 8, 2) / 8) / scaled.numpy()
    assert 1 < factors[2] < 32  # one of the four lies between the two regimes

    model = tiny_model("llama")
    path = write_gguf(tmp_path / "m.gguf", "llama", model, extra=with_factors(factors))
    checkpoint = open_checkpoint(path)
    recovered = checkpoint.config["rope_parameters"]
    assert recovered == scaling | {"factor": pytest.approx(32.0, rel=1e-5)}
    assert "rope_freqs.weight" not in checkpoint

    # Any other scaling would be silently wrong, so it is refused.
    for wrong in (factors * [1, 1, 1.1, 1], np.arange(4), np.zeros(4), np.full(4, np.nan)):
        path = write_gguf(tmp_path / "m.gguf", "llama", model, extra=with_factors(wrong))
        with pytest.raises(CetaneError, match=r"rope_freqs\.weight"):
            open_checkpoint(path)


def test_the_rope_scaling_of_llama_4_scout(
    tmp_path: Path, tiny_model: Any, write_gguf: Any
) -> None:
    """It has one bound: nothing lies between the two regimes."""
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    }
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](
        transformers.LlamaConfig(head_dim=32, rope_parameters=scaling), "cpu"
    )
    factors = (5e5 ** -(np.arange(0, 32, 2) / 32) / scaled.numpy()).astype(np.float32)
    extra = lambda w: w.add_tensor("rope_freqs.weight", factors)  # noqa: E731
    model = tiny_model("llama4", head_dim=32)
    path = write_gguf(tmp_path / "m.gguf", "llama4", model, extra=extra)
    found = open_checkpoint(path).config["rope_parameters"]
    assert found == scaling | {"factor": pytest.approx(16.0, rel=1e-5)}


@pytest.mark.parametrize(
    ("extra", "scaling"),
    [
        (lambda w: w.add_rope_scaling_factor(4.0), {"rope_type": "linear", "factor": 4.0}),
        (
            lambda w: w.add_float32("llama.rope.scale_linear", 8.0),
            {"rope_type": "linear", "factor": 8.0},
        ),
        (lambda w: w.add_rope_scaling_factor(0.0), {"rope_type": "default"}),
        (
            lambda w: (
                w.add_rope_scaling_type(gguf.RopeScalingType.NONE),
                w.add_rope_scaling_factor(4.0),
            ),
            {"rope_type": "default"},
        ),
    ],
)
def test_a_factor_without_a_type_is_linear_as_in_llama_cpp(
    extra: Callable[[gguf.GGUFWriter], None],
    scaling: dict[str, Any],
    tmp_path: Path,
    tiny_model: Any,
    write_gguf: Any,
) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"), extra=extra)
    assert open_checkpoint(path).config["rope_parameters"] == {"rope_theta": 5e5} | scaling


def refused(path: Path, match: str) -> None:
    with pytest.raises(CetaneError, match=match) as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


@pytest.fixture
def good(tmp_path: Path, tiny_model: Any, write_gguf: Any) -> Path:
    return write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"))


def test_truncated_anywhere(good: Path) -> None:
    data = good.read_bytes()
    for size in [0, 3, 4, 7, 8, 23, *range(24, 2000, 37), len(data) // 2, len(data) - 1]:
        good.write_bytes(data[:size])
        refused(good, "ends inside|more than it can hold|runs past|after the end|cannot read")


def test_damaged_header_never_escapes_as_another_error(good: Path) -> None:
    data = good.read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(300):
        damaged = bytearray(data)
        for position in rng.integers(0, 2200, size=rng.integers(1, 4)):
            damaged[position] = rng.integers(256)
        good.write_bytes(damaged)
        try:
            checkpoint = open_checkpoint(good)
            for name in checkpoint.names()[:3]:
                checkpoint.read(name)
        except CetaneError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("offset", "form", "value", "match"),
    [
        (0, "4s", b"GGML", "does not start with GGUF"),
        (4, "<I", 1, "version 1"),
        (4, ">I", 3, "little-endian"),
        (8, "<Q", 1 << 62, "announces 4611686018427387904 tensors, more than it can hold"),
        (16, "<Q", 1 << 62, "announces 4611686018427387904 metadata keys, more than it can hold"),
        (24, "<Q", 1 << 62, "runs past its end"),  # the first key's length
    ],
)
def test_bad_header_fields(good: Path, offset: int, form: str, value: Any, match: str) -> None:
    data = bytearray(good.read_bytes())
    struct.pack_into(form, data, offset, value)
    good.write_bytes(data)
    refused(good, match)


@pytest.mark.parametrize(
    ("offset", "most", "what"), [(8, 1 << 18, "tensors"), (16, 1 << 16, "metadata keys")]
)
def test_more_than_a_model_has(tmp_path: Path, offset: int, most: int, what: str) -> None:
    """They fit the file. A million of them took 7 s, and tensors 600 MB."""
    header = bytearray(24 * (most + 2))
    struct.pack_into("<4sI", header, 0, b"GGUF", 3)
    struct.pack_into("<Q", header, offset, most + 1)
    path = tmp_path / "m.gguf"
    path.write_bytes(header)
    refused(path, f"it announces {most + 1} {what}; at most {most} are read")


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("rank", 9, "9 dimensions"),
        ("rows", 1 << 40, "after the end of the file"),
        ("rows", 0, "impossible"),
        ("type", 999, "unknown type 999"),
        ("type", 4, "unknown type 4"),  # removed from the format
        ("type", int(Kind.I32), "has the type I32, which is not supported"),
        ("offset", 1 << 40, "after the end of the file"),
        ("offset", 1, "not aligned"),
        ("offset", 32, "overlaps another"),
    ],
)
def test_bad_tensor_fields(good: Path, field: str, value: int, match: str) -> None:
    data = bytearray(good.read_bytes())
    rank_at = data.index(b"token_embd.weight") + len(b"token_embd.weight")
    at = {"rank": 0, "rows": 12, "type": 20, "offset": 24}[field]
    struct.pack_into("<Q" if field in ("rows", "offset") else "<I", data, rank_at + at, value)
    good.write_bytes(data)
    refused(good, match)


@pytest.mark.parametrize(
    ("extra", "match"),
    [
        (lambda w: w.add_uint32("split.count", 3), "one of 3 parts"),
        (lambda w: w.add_key_length(7), "odd width"),
        (lambda w: w.add_rope_dimension_count(4), "rotates only part"),
        (lambda w: w.add_value_length(4), "different widths"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), "'longrope'"),
        (lambda w: w.add_rope_scaling_attn_factors(2.0), "attn_factor is not 1"),
        (lambda w: w.add_rope_scaling_yarn_ext_factor(0.5), "yarn_ext_factor is not 0"),
        (lambda w: w.add_array("llama.rope.scaling.attn_factor", [1.0]), "attn_factor is not 1"),
        (
            lambda w: w.add_array("llama.rope.scaling.factor", [4.0, 4.0]),
            "rope.scaling.factor is .*not a positive number",
        ),
        (lambda w: w.add_causal_attention(False), "only causal models"),
        (lambda w: w.add_string("general.alignment", "32"), r"general\.alignment"),
        (
            lambda w: w.add_tensor("blk.0.ffn_up.bias", np.zeros(48, np.float32)),
            "which llama models do not",
        ),
        (
            lambda w: w.add_tensor("blk.0.ffn_gate_inp.weight", np.zeros((4, 32), np.float32)),
            "which llama models do not",
        ),
    ],
)
def test_what_cannot_be_read_faithfully_is_refused(
    extra: Callable[[gguf.GGUFWriter], None],
    match: str,
    tmp_path: Path,
    tiny_model: Any,
    write_gguf: Any,
) -> None:
    refused(write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"), extra=extra), match)


@pytest.mark.parametrize(
    ("variant", "extra", "match"),
    [
        (
            "deepseek2",
            lambda w: w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID),
            "not 1",
        ),
        ("deepseek2", lambda w: w.add_expert_group_count(4), "expert_group_count"),
        ("deepseek2", lambda w: w.add_kv_lora_rank(21), "heads on a latent"),
        ("deepseek2", lambda w: w.add_key_length_mla(8), "more than 8"),
        ("qwen35", lambda w: w.add_ssm_inner_size(35), "multiple of 6 heads"),
        ("qwen35", lambda w: w.add_ssm_group_count(3), "does not fit 3 key heads"),
        ("qwen3next", lambda w: w.add_ssm_state_size(9), "do not fit 2 key heads"),
        ("gemma4", lambda w: w.add_shared_kv_layers(9), "less than 4"),
        ("gemma2", lambda w: w.add_rope_freq_base_swa(100.0), "is 100.0, not 10000.0"),
        ("gpt-oss", lambda w: w.add_rope_freq_base_swa(100.0), "is 100.0, not 150000.0"),
        ("cohere2", lambda w: w.add_rope_freq_base_swa(100.0), "is 100.0, not 10000.0"),
        ("exaone4", lambda w: w.add_rope_freq_base_swa(100.0), "is 100.0, not 10000.0"),
        ("llama4", lambda w: w.add_rope_freq_base_swa(100.0), "is 100.0, not 500000.0"),
        ("granite", lambda w: w.add_rope_scaling_finetuned(False), "is False, not True"),
        ("deepseek3", lambda w: w.add_attn_temperature_scale(0.1), "is 0.1.*, not 0.0"),
        ("lfm2", lambda w: w.add_sliding_window(9), "is 9, not 0"),
        ("exaone-moe", lambda w: w.add_rope_freq_base_swa(100.0), "is 100.0, not 10000.0"),
        (
            "glm4moe",
            lambda w: w.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX),
            "is 1, not 2",
        ),
        ("afmoe", lambda w: w.add_expert_weights_norm(False), "is False, not True"),
        ("minimax", lambda w: w.add_expert_weights_scale(2.0), "is 2.0, not 1.0"),
        ("phimoe", lambda w: w.add_expert_used_count(3), "is 3, not 2"),
        ("hunyuan-moe", lambda w: w.add_expert_shared_count(2), "is 2, not 1"),
        ("llama4", lambda w: w.add_sliding_window(0), "is 0, not left out"),
        ("gemma3n", lambda w: w.add_altup_num_inputs(3), "is 3, not 4"),
        ("gemma3n", lambda w: w.add_activation_sparsity_scale([1.0]), "is not 5 numbers"),
        ("apertus", lambda w: w.add_xielu_alpha_p([0.5]), "xielu.alpha_p is not 2 numbers"),
        ("apertus", lambda w: w.add_xielu_beta([0.5, math.nan]), "xielu.beta has NaN"),
        ("falcon-groups", lambda w: w.add_head_count_kv(3), "do not divide 32 channels"),
        ("mamba2", lambda w: w.add_ssm_inner_size(34), "multiple of"),
        (
            "nemotron-h",
            lambda w: w.add_tensor("blk.1.attn_q.weight", np.zeros((48, 32), np.float32)),
            "layer 1 has full_attention and mlp, not one part",
        ),
        ("lfm2", lambda w: w.add_head_count_kv([0, 2]), "3 integers"),
        (
            "lfm2moe",
            lambda w: w.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX),
            "is 1, not 2",
        ),
    ],
)
def test_hybrids_that_cannot_be_read_faithfully_are_refused(
    variant: str,
    extra: Callable[[gguf.GGUFWriter], None],
    match: str,
    tmp_path: Path,
    tiny_model: Any,
    write_gguf: Any,
) -> None:
    refused(write_gguf(tmp_path / "m.gguf", variant, tiny_model(variant), extra=extra), match)


def test_a_base_of_sliding_layers_that_is_the_others_too(
    tmp_path: Path, tiny_model: Any, write_gguf: Any
) -> None:
    model = tiny_model("gemma2")
    plain = open_checkpoint(write_gguf(tmp_path / "m.gguf", "gemma2", model))
    same = lambda w: w.add_rope_freq_base_swa(10_000.0)  # noqa: E731
    path = write_gguf(tmp_path / "n.gguf", "gemma2", model, extra=same)
    assert open_checkpoint(path).config == plain.config


def test_factors_of_positions_that_a_phimoe_lacks(
    tmp_path: Path, tiny_model: Any, write_gguf: Any
) -> None:
    """Only those of Phi-3.5-MoE are known."""
    model = tiny_model("phimoe-longrope", max_position_embeddings=65536)
    refused(write_gguf(tmp_path / "m.gguf", "phimoe", model), "factors that it does not name")


def test_falcon_2_names_its_rotary_base(tmp_path: Path, tiny_model: Any, write_gguf: Any) -> None:
    """It has one norm, and the converter leaves its base out."""
    model = tiny_model("falcon-groups", num_ln_in_parallel_attn=1)
    refused(write_gguf(tmp_path / "m.gguf", "falcon-groups", model), "names no rotary base")
    named = lambda w: w.add_rope_freq_base(500042.0)  # noqa: E731
    checkpoint = open_checkpoint(
        write_gguf(tmp_path / "n.gguf", "falcon-groups", model, extra=named)
    )
    assert checkpoint.config["rope_parameters"]["rope_theta"] == 500042.0
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(checkpoint.read(name), weight, rtol=0, atol=0)


@pytest.mark.parametrize("variant", ["gemma3n", "gemma4"])
def test_keys_that_no_layer_reads(
    variant: str, tmp_path: Path, tiny_model: Any, write_gguf: Any
) -> None:
    """Layers that take the keys and values of earlier ones have their own in releases."""
    model = tiny_model(variant)
    last = model.config.num_hidden_layers - 1

    def spare(writer: gguf.GGUFWriter) -> None:
        for part in ("k", "v"):
            writer.add_tensor(f"blk.{last}.attn_{part}.weight", np.zeros((32, 32), np.float32))
        writer.add_tensor(f"blk.{last}.attn_k_norm.weight", np.zeros(16, np.float32))

    plain = open_checkpoint(write_gguf(tmp_path / "m.gguf", variant, model))
    both = open_checkpoint(write_gguf(tmp_path / "n.gguf", variant, model, extra=spare))
    assert both.names() == plain.names() and both.config == plain.config


def test_layers_that_share_keys_counted_by_a_float(
    tmp_path: Path, tiny_model: Any, write_gguf: Any
) -> None:
    """As the first files of Gemma 3n have it."""

    def counted(value: float) -> Path:
        key = "gemma3n.attention.shared_kv_layers"
        extra = lambda w: w.add_key_value(key, value, gguf.GGUFValueType.FLOAT32)  # noqa: E731
        path: Path = write_gguf(tmp_path / "m.gguf", "gemma3n", tiny_model("gemma3n"), extra=extra)
        return path

    assert open_checkpoint(counted(2.0)).config["num_kv_shared_layers"] == 2
    for wrong in (2.5, -1.0, 5.0, math.nan, math.inf):
        refused(counted(wrong), "shared_kv_layers is")


def test_a_glm4_that_sees(tmp_path: Path, tiny_model: Any, write_gguf: Any) -> None:
    """The converter puts the halves of what turns one after the other."""
    model, turned = (tiny_model("glm4", attention_bias=True) for _ in range(2))
    for layer in turned.model.layers:
        for part in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            for tensor in (part.weight, part.bias):
                heads = tensor.data.unflatten(0, (-1, 24))
                tensor.data = torch.cat([heads[:, 0:12:2], heads[:, 1:12:2], heads[:, 12:]], 1)
                tensor.data = tensor.data.flatten(0, 1)

    def file(width: int = 12) -> Path:
        def sections(writer: gguf.GGUFWriter) -> None:
            writer.add_rope_dimension_sections([2, 2, 2, 0])
            writer.add_rope_dimension_count(width)

        path: Path = write_gguf(tmp_path / "m.gguf", "glm4", turned, extra=sections)
        return path

    checkpoint = open_checkpoint(file())
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(checkpoint.read(name), weight, rtol=0, atol=0)
    refused(file(11), "11 channels of a head turn, which are no pairs")


def test_a_list_of_layers_counts_more_than_their_period(
    tmp_path: Path, tiny_model: Any, write_gguf: Any
) -> None:
    """The converter writes 4 as the period, whatever the layers are."""

    def listed(writer: gguf.GGUFWriter) -> None:
        writer.add_full_attention_interval(4)
        writer.add_array("qwen35.attention.recurrent_layers", [True, False, True])

    model = tiny_model("qwen35")
    plain = open_checkpoint(write_gguf(tmp_path / "m.gguf", "qwen35", model))
    both = open_checkpoint(write_gguf(tmp_path / "n.gguf", "qwen35", model, extra=listed))
    assert both.config == plain.config


def test_a_period_in_place_of_a_list_of_windows(
    tmp_path: Path, tiny_model: Any, write_gguf: Any
) -> None:
    period = lambda w: w.add_uint32("afmoe.attention.sliding_window_pattern", 2)  # noqa: E731
    path = write_gguf(tmp_path / "m.gguf", "afmoe", tiny_model("afmoe"), extra=period)
    slides = [kind == "sliding_attention" for kind in open_checkpoint(path).config["layer_types"]]
    assert slides == [True, False, True, False, True]


def test_layers_that_only_draft_are_left_out(
    tmp_path: Path, tiny_model: Any, write_gguf: Any
) -> None:
    model = tiny_model("qwen35")
    whole = open_checkpoint(write_gguf(tmp_path / "m.gguf", "qwen35", model))

    def drafting(writer: gguf.GGUFWriter) -> None:
        writer.add_block_count(4)
        writer.add_uint32("qwen35.nextn_predict_layers", 1)
        writer.add_tensor("blk.3.nextn.eh_proj.weight", np.zeros((32, 64), np.float32))

    checkpoint = open_checkpoint(write_gguf(tmp_path / "n.gguf", "qwen35", model, extra=drafting))
    assert checkpoint.config == whole.config and checkpoint.names() == whole.names()


def test_rows_of_what_a_file_keeps_in_pieces(
    tmp_path: Path, tiny_model: Any, write_gguf: Any
) -> None:
    for variant in ("gpt-oss", "qwen3next", "deepseek2", "lfm2", "lfm2moe", "qwen2moe"):
        path = write_gguf(tmp_path / f"{variant}.gguf", variant, tiny_model(variant))
        checkpoint = open_checkpoint(path)
        for name in checkpoint.names():
            whole = checkpoint.read(name)
            assert torch.equal(checkpoint.read_rows(name, 1, len(whole)), whole[1:])


def test_missing_tensor(tmp_path: Path, tiny_model: Any, write_gguf: Any) -> None:
    skip = "model.layers.1.self_attn.o_proj.weight"
    path = write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"), skip=skip)
    refused(path, r"lacks tensor 'blk\.1\.attn_output\.weight'")


def test_missing_and_mistyped_metadata(good: Path) -> None:
    data = good.read_bytes()
    good.write_bytes(data.replace(b"llama.block_count", b"llama.block_clown"))
    refused(good, r"llama\.block_count is missing")
    at = data.index(b"llama.block_count") + len(b"llama.block_count")
    good.write_bytes(data[:at] + struct.pack("<If", 6, 2.0) + data[at + 8 :])  # a float
    refused(good, "not a positive integer")
    good.write_bytes(data[:at] + struct.pack("<II", 4, 1 << 31) + data[at + 8 :])
    refused(good, "2147483648 layers")


@pytest.mark.parametrize("key", ["expert_count", "nextn_predict_layers"])
def test_a_list_in_place_of_a_number(tmp_path: Path, key: str) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for name in ("block_count", "embedding_length", "attention.head_count"):
        writer.add_uint32(f"llama.{name}", 2)
    writer.add_array(f"llama.{key}", [1, 1])
    for index in range(3):
        writer.add_tensor(f"blk.{index}.attn_norm.weight", np.zeros(2, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(tmp_path / "m.gguf", rf"llama\.{key} .*not a (whole )?number")


def test_unknown_architecture(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "bloom")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    refused(tmp_path / "m.gguf", "'bloom', which is not read from GGUF")


def test_unknown_tensor_name_and_file_cut_after_opening(good: Path) -> None:
    checkpoint = open_checkpoint(good)
    assert "model.norm.weight" in checkpoint and "blk.0.attn_q.weight" not in checkpoint
    for ask in (checkpoint.read, checkpoint.shape, checkpoint.dtype):
        with pytest.raises(CetaneError, match="no tensor 'nope'"):
            ask("nope")
    good.write_bytes(good.read_bytes()[:3000])
    with pytest.raises(CetaneError, match="became shorter"):
        checkpoint.read("lm_head.weight")


def test_fingerprint_follows_the_file(good: Path) -> None:
    first = open_checkpoint(good).fingerprint
    assert first == open_checkpoint(good).fingerprint and len(first) == 64
    data = bytearray(good.read_bytes())
    data[-1] ^= 1
    good.write_bytes(data)
    assert open_checkpoint(good).fingerprint != first


def test_opening_loads_neither_torch_nor_transformers(good: Path) -> None:
    code = (
        "import sys; from cetane.checkpoint import open_checkpoint\n"
        f"open_checkpoint({str(good)!r}).fingerprint\n"
        "assert not {'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def split(path: Path, folder: Path, parts: int) -> list[Path]:
    """The file in parts, as llama-gguf-split makes them: metadata in the first alone."""
    reader = gguf.GGUFReader(path)
    written = []
    for number in range(parts):
        target = folder / f"m-{number + 1:05}-of-{parts:05}.gguf"
        writer = gguf.GGUFWriter(target, "llama")
        if not number:
            for name, field in reader.fields.items():
                if not name.startswith("GGUF.") and name != "general.architecture":
                    writer.add_key_value(name, field.contents(), field.types[0])
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", parts)
        for tensor in reader.tensors[number::parts]:
            writer.add_tensor(tensor.name, tensor.data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        written.append(target)
    return written


def test_a_split_file_is_read_from_any_part(
    tmp_path: Path, tiny_model: Any, write_gguf: Any
) -> None:
    whole = open_checkpoint(write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama")))
    parts = split(tmp_path / "m.gguf", tmp_path, 3)
    for path in parts:
        checkpoint = open_checkpoint(path)
        assert checkpoint.names() == whole.names()
        for name in whole.names():
            assert torch.equal(checkpoint.read(name), whole.read(name))
    before = open_checkpoint(parts[0]).fingerprint
    parts[2].touch()
    assert open_checkpoint(parts[0]).fingerprint != before


def test_parts_that_are_missing_or_another_models(
    tmp_path: Path, tiny_model: Any, write_gguf: Any
) -> None:
    write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"))
    first, second, third = split(tmp_path / "m.gguf", tmp_path, 3)
    content = second.read_bytes()
    second.unlink()
    with pytest.raises(CetaneError, match="is missing, one of 3 parts"):
        open_checkpoint(first)
    second.write_bytes(third.read_bytes())
    with pytest.raises(CetaneError, match="is not part 1 of 3"):
        open_checkpoint(first)
    second.write_bytes(content)
    first.rename(tmp_path / "first.gguf")
    with pytest.raises(CetaneError, match="is not named"):
        open_checkpoint(tmp_path / "first.gguf")


def test_a_header_of_holes(tmp_path: Path) -> None:
    """Holes take no room on a disk, and are texts. One of 2 GB was read and printed."""
    path = tmp_path / "m.gguf"
    key = struct.pack("<Q20sIQ", 20, b"general.architecture", 8, 2 << 30)
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key)
        file.truncate(3 << 30)
    refused(path, "its header has more than 268,435,456 bytes")
