"""Zyphra's own ZAYA layout against the transformers model that it was written from."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from cetane.checkpoint import Checkpoint, open_checkpoint
from cetane.errors import CetaneError

THETA, LOCAL_THETA, WINDOW = 5e6, 1e4, 5
ROPE = {
    "hybrid": {"rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": 0.5},
    "hybrid_sliding": {
        "rope_type": "default",
        "rope_theta": LOCAL_THETA,
        "partial_rotary_factor": 0.5,
    },
}
TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "moe_intermediate_size": 24,
    "router_hidden_size": 32,
    "rms_norm_eps": 2e-5,
    "max_position_embeddings": 128,
    "rope_parameters": ROPE,
    "bos_token_id": 2,
    "eos_token_id": 106,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"num_hidden_layers": 3},
    "bias": {"num_hidden_layers": 2, "attention_bias": True, "tie_word_embeddings": False},
    "sliding": {
        "num_hidden_layers": 3,
        "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
        "sliding_window": WINDOW,
    },
}
EXPERTS = "model.layers.1.mlp.experts"


def zaya(variant: str) -> transformers.PreTrainedModel:
    """A random model in which no parameter or buffer has its default."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("zaya", **TINY, **VARIANTS[variant])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor += torch.randn_like(tensor) * (0.02 if name.endswith("_biases") else 0.1)
    return model.eval()


def original_config(model: transformers.PreTrainedModel) -> dict[str, Any]:
    """As Zyphra/ZAYA1-8B-legacy has it: one value for all blocks."""
    config = model.config
    original = {
        "model_type": "zaya",
        "activation_func": "swiglu",
        "add_bias_linear": False,
        "attention_bias": config.attention_bias,
        "bos_token_id": 2,
        "cca": True,
        "eos_token_id": 106,
        "ffn_hidden_size": 2 * config.moe_intermediate_size,
        "gated_linear_unit": True,
        "head_dim": config.head_dim,
        "hidden_size": config.hidden_size,
        "kv_channels": config.head_dim,
        "lm_head_bias": False,
        "max_position_embeddings": config.max_position_embeddings,
        "moe_router_topk": 1,
        "norm_epsilon": config.rms_norm_eps,
        "normalization": "RMSNorm",
        "num_attention_heads": config.num_attention_heads,
        "num_experts": config.num_experts,
        "num_hidden_layers": 2 * config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "num_query_groups": config.num_key_value_heads,
        "pad_token_id": 0,
        "partial_rotary_factor": 0.5,
        "residual_in_fp32": True,
        "rope_scaling": False,
        "rope_theta": int(THETA),
        "scale_residual_merge": True,
        "sliding_window": None,
        "tie_word_embeddings": config.tie_word_embeddings,
        "vocab_size": config.vocab_size,
        "zaya_mlp_expansion": config.router_hidden_size,
        "zaya_use_eda": True,
        "zaya_use_mod": True,
    }
    if config.sliding_window is not None:
        original["swa_rotary_base"] = int(LOCAL_THETA)
        original["swa_layers"] = []
        for kind in config.layer_types:
            original["swa_layers"] += [WINDOW - 1 if kind == "hybrid_sliding" else 0, 0]
    return original


def per_block(original: dict[str, Any]) -> dict[str, Any]:
    """The same as Zyphra/ZAYA1-base has it: a list with an entry for every block."""
    config = dict(original)
    layers = config["num_hidden_layers"] // 2
    config["num_hidden_layers"] = 120  # wrong, and not read
    config["zaya_layers"] = ["a", config.pop("num_experts")] * layers
    config["cca_num_q_heads"] = [config["num_attention_heads"], 0] * layers
    config["num_query_groups_list"] = [config.pop("num_query_groups"), None] * layers
    config["ffn_hidden_size_list"] = [0, config.pop("ffn_hidden_size")] * (layers + 3)
    config["zaya_mlp_expansion"] = [0, config["zaya_mlp_expansion"]] * layers
    # Its heads are those that there would be without compression; their width follows.
    config["num_attention_heads"] = config["hidden_size"] // config.pop("head_dim")
    del config["kv_channels"], config["rope_scaling"]
    return config


def original_tensors(model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    """The model's state under Zyphra's names, and a buffer that only the original has."""
    state = dict(model.state_dict())
    last = model.config.num_hidden_layers - 1
    out = {
        "model.embed_tokens.weight": state.pop("model.embed_tokens.weight"),
        "model.final_norm.weight": state.pop("model.norm.weight"),
        "model.rotary_emb.inv_freq": torch.ones(8),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
    }
    head = state.pop("lm_head.weight")
    if not model.config.tie_word_embeddings:
        out["lm_head.weight"] = head

    def move(source: str, target: str) -> None:
        for suffix in (".weight", ".bias", ""):
            if source + suffix in state:
                out[target + suffix] = state.pop(source + suffix)

    for end in ("scale", "bias"):
        move(f"model.input_hidden_states_{end}", f"model.layers.0.res_scale.hidden_states_{end}")
    for layer in range(last + 1):
        here = f"model.layers.{layer}"
        attention, moe = f"model.layers.{2 * layer}", f"model.layers.{2 * layer + 1}"
        after = "model" if layer == last else f"model.layers.{2 * layer + 2}"
        move(f"{here}.input_layernorm", f"{attention}.input_norm")
        move(f"{here}.self_attn.o_proj", f"{attention}.self_attn.o_proj")
        move(f"{here}.self_attn.qk_norm.temp", f"{attention}.self_attn.qkv.temp")
        for theirs, ours in (
            ("linear_q", "q_proj"),
            ("linear_k", "k_proj"),
            ("val_proj1", "v_proj_current"),
            ("val_proj2", "v_proj_delayed"),
            ("conv_qk.0", "conv_qk_depthwise"),
            ("conv_qk.1", "conv_qk_grouped"),
        ):
            move(f"{here}.self_attn.qkv_proj.{ours}", f"{attention}.self_attn.qkv.{theirs}")
        move(f"{here}.post_attention_layernorm", f"{moe}.input_norm")
        router = f"{moe}.zaya_block.router"
        for same in ("down_proj", "router_states_scale", "balancing_biases"):
            move(f"{here}.mlp.gate.{same}", f"{router}.{same}")
        move(f"{here}.mlp.gate.router_mlp.norm", f"{router}.rmsnorm_eda")
        for i, ours in ((0, "fc1"), (2, "fc2"), (4, "out_proj")):
            move(f"{here}.mlp.gate.router_mlp.{ours}", f"{router}.router_mlp.{i}")
        for theirs, ours in (("linear_fc1", "gate_up_proj"), ("linear_fc2", "down_proj")):
            for e, expert in enumerate(state.pop(f"{here}.mlp.experts.{ours}")):
                out[f"{moe}.zaya_block.experts.local_experts.{e}.{theirs}.weight"] = expert
        for part in (
            "hidden_states_scale",
            "hidden_states_bias",
            "residual_scale",
            "residual_bias",
        ):
            move(f"{here}.post_attention_residual_scale.{part}", f"{moe}.res_scale.{part}")
            move(f"{here}.post_mlp_residual_scale.{part}", f"{after}.res_scale.{part}")
    assert not state
    return out


def write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    """A folder of three shards; what belongs together is in different ones."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    weight_map = {}
    for i in range(3):
        file = f"model-{i}.safetensors"
        save_file({name: tensors[name].clone() for name in names[i::3]}, folder / file)
        weight_map |= dict.fromkeys(names[i::3], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def logits(model: transformers.PreTrainedModel) -> torch.Tensor:
    tokens = torch.randint(0, 96, (2, 3 * WINDOW), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        return model(tokens).logits


@pytest.mark.parametrize("form", [lambda config: config, per_block], ids=["scalars", "lists"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_model_comes_back(
    variant: str, form: Callable[[dict[str, Any]], dict[str, Any]], tmp_path: Path
) -> None:
    model = zaya(variant)
    folder = write(tmp_path / "m", form(original_config(model)), original_tensors(model))
    checkpoint = open_checkpoint(folder)
    config = transformers.AutoConfig.for_model(**checkpoint.config)
    expected = model.config.to_dict()
    for key, value in checkpoint.config.items():
        if key not in ("architectures", "rope_parameters"):
            assert expected[key] == value, key
    again = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    state = {name: checkpoint.read(name) for name in checkpoint.names()}
    missing, unexpected = again.load_state_dict(state, strict=False)
    again.tie_weights()
    assert not unexpected
    assert missing == (["lm_head.weight"] if config.tie_word_embeddings else [])
    assert torch.equal(logits(model), logits(again.eval()))


def test_every_tensor_matters(tmp_path: Path) -> None:
    """Else equal logits would prove nothing of, say, the order of the residual scales."""
    model = zaya("plain")
    before = logits(model)
    for name, tensor in model.named_parameters():
        with torch.no_grad():
            kept = tensor.clone()
            tensor.mul_(2)
            assert not torch.equal(logits(model), before), name
            tensor.copy_(kept)


@pytest.fixture
def model() -> transformers.PreTrainedModel:
    return zaya("plain")


@pytest.fixture
def checkpoint(model: transformers.PreTrainedModel, tmp_path: Path) -> Checkpoint:
    tensors = {name: t.bfloat16() for name, t in original_tensors(model).items()}
    return open_checkpoint(write(tmp_path / "m", original_config(model), tensors))


def test_headers(checkpoint: Checkpoint, model: transformers.PreTrainedModel) -> None:
    assert checkpoint.names() == sorted(set(model.state_dict()) - {"lm_head.weight"})
    for name in checkpoint.names():
        assert checkpoint.shape(name) == tuple(model.state_dict()[name].shape)
        assert checkpoint.dtype(name) == "BF16"
    assert f"{EXPERTS}.down_proj" in checkpoint
    assert "model.layers.3.zaya_block.router.down_proj.weight" not in checkpoint


@pytest.mark.parametrize("name", [f"{EXPERTS}.gate_up_proj", "model.embed_tokens.weight"])
def test_rows(checkpoint: Checkpoint, name: str) -> None:
    whole = checkpoint.read(name)
    rows = len(whole)
    for start, stop in ((0, rows), (0, 1), (1, 3), (rows - 1, rows), (2, 2), (rows, rows)):
        part = checkpoint.read_rows(name, start, stop)
        assert torch.equal(part, whole[start:stop]) and part.shape == whole[start:stop].shape
    for start, stop in ((0, rows + 1), (-1, 1), (2, 1), (-2, -1)):
        with pytest.raises(CetaneError, match=f"'{name}' of shape .* has no rows {start} to"):
            checkpoint.read_rows(name, start, stop)
    with pytest.raises(CetaneError, match="no tensor 'x'"):
        checkpoint.read_rows("x", 0, 1)


def test_only_the_experts_asked_for_are_read(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Expert 1 is in the shard that is gone, expert 2 is not."""
    weight_map = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    part = "model.layers.3.zaya_block.experts.local_experts.{}.linear_fc2.weight"
    gone, kept = (weight_map["weight_map"][part.format(e)] for e in (1, 2))
    assert gone != kept
    (tmp_path / "m" / gone).unlink()
    checkpoint.read_rows(f"{EXPERTS}.down_proj", 2, 3)
    with pytest.raises(CetaneError, match="cannot read"):
        checkpoint.read_rows(f"{EXPERTS}.down_proj", 1, 3)


def test_fingerprint_is_that_of_the_files(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = tmp_path / "m" / "config.json"
    assert open_checkpoint(path.parent).fingerprint == checkpoint.fingerprint
    path.write_text(path.read_text() + "\n")
    changed = open_checkpoint(path.parent)
    assert changed.config == checkpoint.config
    assert changed.fingerprint != checkpoint.fingerprint


def test_the_layout_of_transformers_is_left_alone(
    model: transformers.PreTrainedModel, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config == json.loads((tmp_path / "config.json").read_text())
    for name in checkpoint.names():
        assert torch.equal(checkpoint.read(name), model.state_dict()[name])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"num_hidden_layers": 5}, "num_hidden_layers announces 5 blocks"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers announces 1000000000 blocks"),
        ({"num_hidden_layers": "6"}, "num_hidden_layers holds '6'"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"zaya_layers": []}, "zaya_layers announces 0 blocks"),
        ({"zaya_layers": ["a", 4, "a"]}, "zaya_layers announces 3 blocks"),
        ({"zaya_layers": ["a", 4, 4, "a"]}, "zaya_layers does not alternate"),
        ({"zaya_layers": "a4"}, "zaya_layers does not alternate"),
        ({"zaya_layers": ["a", 4, "a", "a"]}, "zaya_layers holds 'a'"),
        ({"zaya_layers": ["a", 4, "a", 8]}, "zaya_layers holds 8, but zaya_layers holds 4"),
        ({"zaya_layers": ["a", 8] * 3}, "num_experts holds 4, but zaya_layers holds 8"),
        ({"num_experts": None}, "zaya_layers is missing"),
        ({"moe_router_topk": 2}, "moe_router_topk is 2"),
        ({"num_experts_per_tok": 2}, "num_experts_per_tok is 2"),
        ({"activation_func": "gelu"}, "activation_func is 'gelu'"),
        ({"normalization": "LayerNorm"}, "normalization is 'LayerNorm'"),
        ({"lm_head_bias": True}, "lm_head_bias is True"),
        ({"add_bias_linear": True}, "add_bias_linear is True"),
        ({"clamp_temp": True}, "clamp_temp is True"),
        ({"cca": False}, "cca is False"),
        ({"zaya_use_mod": False}, "zaya_use_mod is False"),
        ({"zaya_use_eda": False}, "zaya_use_eda is False"),
        ({"scale_residual_merge": False}, "scale_residual_merge is False"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling is {'type': 'yarn'}"),
        ({"layer_types": ["full_attention"]}, "layer_types is"),
        ({"cca_num_q_heads": [4, 0, 8, 0, 4, 0]}, "cca_num_q_heads holds 8, but cca_num_q_heads"),
        ({"cca_num_q_heads": [4, 0, 4, 0]}, "cca_num_q_heads has 4 entries for 6 blocks"),
        ({"cca_num_q_heads": [[4], 0] * 3}, r"cca_num_q_heads holds \[4\]"),
        ({"num_attention_heads": 3}, "num_attention_heads is 3, not a multiple of 2"),
        ({"num_key_value_heads": 1}, "num_key_value_heads holds 1, but num_query_groups holds 2"),
        ({"ffn_hidden_size": 47}, "ffn_hidden_size is 47"),
        ({"ffn_hidden_size": None}, "ffn_hidden_size_list is missing"),
        ({"zaya_mlp_expansion": [0, 32, 0, 64, 0, 32]}, "zaya_mlp_expansion holds 64"),
        ({"kv_channels": 32}, "kv_channels holds 32, but head_dim holds 16"),
        ({"kv_channels": None, "head_dim": None}, "head_dim is missing"),
        (
            {"kv_channels": None, "head_dim": None, "cca_num_q_heads": 4, "hidden_size": 66},
            "num_attention_heads is 4, which does not divide 66",
        ),
        ({"hidden_size": True}, "hidden_size holds True"),
        ({"hidden_size": [64] * 6}, r"hidden_size holds \[64"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"norm_epsilon": 0}, "norm_epsilon holds 0"),
        ({"rope_theta": None}, "rope_theta is missing"),
        ({"rope_theta": float("inf")}, "rope_theta holds inf"),
        ({"rope_theta": 10**400}, "more than 40 digits"),
        ({"rope_theta": -(10**30)}, "rope_theta holds -1000"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"swa_layers": [4, 0] * 3}, "swa_rotary_base is missing"),
        ({"swa_layers": [4, 0, 8, 0, 0, 0]}, r"swa_layers holds windows .* sizes: \[4, 8\]"),
        ({"swa_layers": 4}, "swa_layers is not a list"),
        ({"swa_layers": [4, 0, -1, 0, 4, 0]}, "swa_layers is not a list"),
        ({"swa_layers": [4, 0]}, "swa_layers has 2 entries for 6 blocks"),
        ({"sliding_window": 4}, "sliding_window is not None, as swa_layers make it"),
    ],
)
def test_bad_config(
    change: dict[str, Any], match: str, model: transformers.PreTrainedModel, tmp_path: Path
) -> None:
    write(tmp_path, original_config(model) | change, {"model.embed_tokens.weight": torch.ones(1)})
    where = r"config\.json(:| is not valid JSON:)"
    with pytest.raises(CetaneError, match=rf"{where} (a number of )?{match}") as caught:
        open_checkpoint(tmp_path)
    assert "\n" not in str(caught.value)


EXPERT = "model.layers.1.zaya_block.experts.local_experts"


@pytest.mark.parametrize(
    ("name", "tensor", "match"),
    [
        (
            "model.layers.6.input_norm.weight",
            torch.ones(64),
            "6 blocks, but there is 'model.layers.6",
        ),
        (
            f"{EXPERT}.4.linear_fc2.weight",
            torch.ones(64, 24),
            rf"4 experts, but there is '{EXPERT}.4",
        ),
        (f"{EXPERT}.2.linear_fc2.weight", torch.ones(64, 20), rf"'{EXPERT}.2.* \(64, 20\), but"),
        (f"{EXPERT}.2.linear_fc2.weight", torch.ones(64, 24).half(), "is F16 of shape .* is F32"),
    ],
)
def test_bad_tensors(
    name: str, tensor: torch.Tensor, match: str, model: transformers.PreTrainedModel, tmp_path: Path
) -> None:
    write(tmp_path, original_config(model), original_tensors(model) | {name: tensor})
    with pytest.raises(CetaneError, match=match) as caught:
        open_checkpoint(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("lost", "target"),
    [
        (f"{EXPERT}.3.linear_fc1.weight", "model.layers.0.mlp.experts.gate_up_proj"),
        ("model.layers.2.self_attn.qkv.temp", "model.layers.1.self_attn.qk_norm.temp"),
        (
            "model.res_scale.residual_bias",
            "model.layers.2.post_mlp_residual_scale.residual_bias",
        ),
    ],
)
def test_missing_tensors_are_errors_when_read(
    lost: str, target: str, model: transformers.PreTrainedModel, tmp_path: Path
) -> None:
    tensors = original_tensors(model)
    del tensors[lost]
    checkpoint = open_checkpoint(write(tmp_path, original_config(model), tensors))
    assert target not in checkpoint
    with pytest.raises(CetaneError, match=f"{tmp_path} has no tensor '{target}'"):
        checkpoint.read(target)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.res_scale.residual_scale",  # nothing is before the first block
        "model.layers.01.input_norm.weight",
        "model.layers.1.zaya_block.router.rmsnorm_eda.running_mean",
        "model.layers.0.zaya_block.router.down_proj.weight",
        "model.res_scale.other",
        "lm_head.weight",  # tied: the embedding is the head
        "x",
    ],
)
def test_tensors_without_a_place_are_ignored(
    name: str, model: transformers.PreTrainedModel, tmp_path: Path
) -> None:
    tensors = original_tensors(model)
    write(tmp_path, original_config(model), tensors | {name: torch.ones(1)})
    assert open_checkpoint(tmp_path).names() == sorted(set(model.state_dict()) - {"lm_head.weight"})
