"""Models as llama.cpp's converter writes them."""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from tests.gguf_keys import write_keys

INTERLEAVED = (
    "arcee", "granite", "granite_swa", "granitehybrid", "granitemoe", "llama", "mistral3",
    "nemotron_h", "nemotron_h_moe", "olmo", "smollm3",
)  # fmt: skip
"""Architectures whose rows of q and k llama.cpp's converter puts in another order."""


NAMED_AS = {"granite_swa": "granitehybrid", "mellum": "qwen3moe"}
"""The architectures that the gguf package does not know, and those of like names."""
UNKNOWN = {
    "self_attn.sinks": "attn_sinks",
    "mlp.experts.gate_up_proj": "ffn_gate_up_exps",
}
"""The names that the package lacks for them."""


def unknown(name: str) -> str:
    """The file's name of a tensor of `UNKNOWN`."""
    _, _, index, module = name.removesuffix(".weight").split(".", 3)
    return f"blk.{index}.{UNKNOWN[module]}.weight"


def apart(tensors: dict[str, torch.Tensor], architecture: str) -> dict[str, torch.Tensor]:
    """The tensors, with the gates of experts apart from what stands beside them.

    gpt-oss and Llama 4 keep them transposed, gpt-oss gates and ups in turn.
    """
    turned = architecture in ("gpt-oss", "llama4")
    result: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        prefix, _, last = name.partition("experts.")
        end = ".bias" if last.endswith("_bias") else ".weight"
        if turned and last and end == ".weight":
            tensor = tensor.mT
        if last.startswith("gate_up_proj") and architecture != "granite_swa":
            in_turn = architecture == "gpt-oss"
            halves = (tensor[:, ::2], tensor[:, 1::2]) if in_turn else tensor.chunk(2, dim=1)
            for part, half in zip(("gate", "up"), halves, strict=True):
                result[f"{prefix}experts.{part}_proj{end}"] = half
        elif (kind := last.removesuffix("_bias")) in ("down_proj", "up_proj", "gate_up_proj"):
            result[f"{prefix}experts.{kind}{end}"] = tensor
        else:
            result[f"{name}.weight" if name.endswith("sinks") else name] = tensor
    return result


def turned_pairs(config: transformers.PreTrainedConfig) -> dict[str, torch.Tensor]:
    """Gemma 4's tensor of the pairs that full layers do not turn."""
    dim = config.per_layer_config["full_attention"].head_dim
    turned = int(dim * config.rope_parameters["full_attention"]["partial_rotary_factor"] / 2)
    return {"rope_freqs.weight": torch.tensor([1.0] * turned + [1e30] * (dim // 2 - turned))}


def grouped_as_tiled(
    tensor: torch.Tensor, heads: int, groups: int, before: int = 0
) -> torch.Tensor:
    """Rows of value heads: all first ones of a key head, then all second ones ..."""
    rows = tensor[before:].unflatten(0, (heads, groups, -1)).transpose(0, 1).flatten(0, 2)
    return torch.cat([tensor[:before], rows])


def of_delta_rule(
    config: transformers.PreTrainedConfig, name: str, tensor: torch.Tensor
) -> dict[str, torch.Tensor]:
    """A tensor of a Qwen3-Next or Qwen3.5 as the file has it."""
    heads, keys = config.linear_num_key_heads, config.linear_key_head_dim
    groups, values = config.linear_num_value_heads // heads, config.linear_value_head_dim
    tiled = config.model_type != "qwen3_next"
    last = name.removesuffix(".weight").rpartition(".")[2]
    if name.endswith("norm.weight"):
        return {name: tensor if "linear_attn" in name else tensor + 1}
    if last == "in_proj_qkvz":
        sizes = [keys, keys, groups * values, groups * values]
        q, k, v, z = (
            part.flatten(0, 1) for part in tensor.unflatten(0, (heads, -1)).split(sizes, 1)
        )
        return {
            name.replace("qkvz", "qkv"): torch.cat([q, k, v]),
            name.replace("qkvz", "z"): z,
        }
    if last == "A_log":
        tensor = -tensor.exp()
    elif last == "conv1d":
        tensor = tensor.squeeze(1)
    if tiled and "linear_attn" in name:
        if last == "out_proj":
            tensor = grouped_as_tiled(tensor.T, heads, groups).T
        else:
            before = 2 * heads * keys if last in ("in_proj_qkv", "conv1d") else 0
            tensor = grouped_as_tiled(tensor, heads, groups, before)
    return {name.replace("dt_bias", "dt_proj.bias"): tensor}


def of_mamba(
    config: transformers.PreTrainedConfig, name: str, tensor: torch.Tensor
) -> dict[str, torch.Tensor]:
    """A tensor of a Mamba-2 as the file has it: vectors as columns, gains group by group."""
    last = name.removesuffix(".weight").rpartition(".")[2]
    if last == "A_log":
        return {name: -tensor.exp()[:, None]}
    if last == "D":
        return {name: tensor[:, None]}
    if last == "norm":
        groups = getattr(config, "mamba_n_groups", None) or config.n_groups
        return {name: tensor.reshape(groups, -1)}
    if last == "conv1d":
        return {name: tensor.squeeze(1)}
    return {name.replace("dt_bias", "dt_proj.bias"): tensor}


def three_parts(config: transformers.PreTrainedConfig, tensor: torch.Tensor) -> torch.Tensor:
    """Queries, keys and values of each head together -> all queries, all keys, all values."""
    heads = tensor.unflatten(0, (config.num_attention_heads, 3, -1))
    return heads.transpose(0, 1).flatten(0, 2)


def group_parts(config: transformers.PreTrainedConfig, tensor: torch.Tensor) -> torch.Tensor:
    """Queries, keys and values of each group of heads together -> all of each."""
    count = config.num_kv_heads if config.new_decoder_architecture else 1
    width = config.hidden_size // config.num_attention_heads
    groups = tensor.unflatten(0, (count, -1, width))
    parts = (groups[:, :-2], groups[:, -2:-1], groups[:, -1:])
    return torch.cat([part.flatten(0, 2) for part in parts])


def of_nemotron(
    config: transformers.PreTrainedConfig, name: str, tensor: torch.Tensor
) -> dict[str, torch.Tensor]:
    """A tensor of a Nemotron-H as the file has it, under the names of its releases."""
    name = name.replace("model.", "backbone.")
    if ".experts." in name:
        return {name.replace("backbone", "model").replace("mixer", "mlp"): tensor}
    if name.endswith("correction_bias"):
        return {name.replace("_bias", ".bias"): tensor}
    return of_mamba(config, name, tensor) if ".mixer." in name else {name: tensor}


def streams(name: str, tensor: torch.Tensor, result: dict[str, torch.Tensor]) -> None:
    """One of Gemma 3n's projections between streams, which lie in one tensor."""
    whole = f"{name.rpartition('.weight')[0].rpartition('.')[0]}.weight"
    before = [result[whole]] if whole in result else []
    result[whole] = torch.cat([*before, tensor[None]])


def as_stored(model: transformers.PreTrainedModel, architecture: str) -> dict[str, torch.Tensor]:
    """The tensors as the converter names, splits and turns them, before gguf's own names."""
    config, result = model.config, dict[str, torch.Tensor]()
    for name, tensor in apart(model.state_dict(), architecture).items():
        if ".act_fn." in name:
            continue  # numbers of the metadata
        if architecture in ("nemotron_h", "nemotron_h_moe"):
            result |= of_nemotron(config, name, tensor)
        elif architecture == "mamba2":
            result |= of_mamba(config, name, tensor) if ".mixer." in name else {name: tensor}
        elif "query_key_value" in name and architecture == "falcon":
            result[name] = group_parts(config, tensor)
        elif ".altup_" in name:
            streams(name, tensor, result)
        elif architecture in ("qwen3next", "qwen35", "qwen35moe"):
            result |= of_delta_rule(config, name, tensor)
        elif architecture == "qwen2moe" and name.endswith("shared_expert_gate.weight"):
            result[name] = tensor.squeeze(0)
        elif ".mamba." in name:
            result |= of_mamba(config, name, tensor)
        elif "shared_mlp" in name and architecture == "granite_swa":
            last = "down" if "output" in name else "up"
            before = name.partition("shared_mlp.")[0]
            result[f"{before}mlp.shared_expert.{last}_proj.weight"] = tensor
        elif (
            "shared_mlp" in name and architecture != "hunyuan-moe"
        ):  # the gguf package knows other names for them
            before, _, last = name.partition("shared_mlp.")
            home = f"{before}mlp.shared_expert" if config.num_local_experts else f"{before}mlp"
            parts = ("down",) if last.startswith("output") else ("gate", "up")
            for part, rows in zip(parts, tensor.chunk(len(parts)), strict=True):
                result[f"{home}.{part}_proj.weight"] = rows
        elif architecture in ("granitemoe", "granitehybrid", "granite_swa"):
            result[name.replace("moe.router", "moe.gate").replace("block_sparse_moe", "mlp")] = (
                tensor
            )
        elif architecture == "gpt2":
            turned = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
            result[name] = tensor.T if turned else tensor
        elif "query_key_value" in name:
            result[name] = three_parts(config, tensor)
        elif name.endswith("e_score_correction_bias"):
            before = name.removesuffix("gate.e_score_correction_bias")
            before = before.removesuffix("gate.moe_statics.e_score_correction_bias")
            if architecture == "minimax-m2":  # the package knows its releases' name alone
                before = before.removesuffix("mlp.e_score_correction_bias") + "block_sparse_moe."
            result[f"{before}e_score_correction.bias"] = tensor
        elif name.endswith("expert_bias"):
            result[f"{name}.bias"] = tensor
        elif name.endswith("kv_b_proj.weight") and architecture != "minicpm3":
            both = tensor.unflatten(0, (config.num_attention_heads, -1))
            keys, values = both.split([config.qk_nope_head_dim, config.v_head_dim], 1)
            result[name.replace("kv_b", "k_b")] = keys.mT
            result[name.replace("kv_b", "v_b")] = values
        elif name.endswith("conv.conv.weight"):
            result[name] = tensor.squeeze(1)
        else:
            bare = name.endswith(("layer_scalar", "output_scale"))
            result[f"{name}.weight" if bare else name] = tensor
    return result | (turned_pairs(config) if architecture == "gemma4" else {})


def write_gguf(
    path: Path,
    architecture: str,
    model: transformers.PreTrainedModel,
    quantization: gguf.GGMLQuantizationType | None = None,
    extra: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    skip: str | None = None,
) -> Path:
    """Write a model to a file; `quantization` is of matrices, `extra` adds keys, and the tensor
    `skip` is left out."""
    writer = gguf.GGUFWriter(path, architecture)
    write_keys(writer, architecture, model.config)
    write_tensors(writer, architecture, model, quantization, skip)
    if architecture == "apertus":
        write_xielu(writer, model)
    extra(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_xielu(writer: gguf.GGUFWriter, model: transformers.PreTrainedModel) -> None:
    """The numbers of every layer's activation."""
    acts = [layer.mlp.act_fn for layer in model.model.layers]
    writer.add_xielu_alpha_p([act.alpha_p.item() for act in acts])
    writer.add_xielu_alpha_n([act.alpha_n.item() for act in acts])
    writer.add_xielu_beta([act.beta.item() for act in acts])
    writer.add_xielu_eps([act.eps.item() for act in acts])


def write_tensors(
    writer: gguf.GGUFWriter,
    architecture: str,
    model: transformers.PreTrainedModel,
    quantization: gguf.GGMLQuantizationType | None,
    skip: str | None,
) -> None:
    """All tensors but `skip`, named by the gguf package.

    `quantization` is of matrices whose rows are whole blocks.
    """
    config = model.config
    named = NAMED_AS.get(architecture, architecture)
    kind = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == named)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    for name, tensor in as_stored(model, architecture).items():
        if name == skip or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        values = tensor.numpy()
        if architecture in INTERLEAVED and (".q_proj." in name or ".k_proj." in name):
            values = interleaved(values, config, ".q_proj." in name)
        gains = architecture in ("gemma", "gemma2", "gemma3", "nemotron")
        if gains and name.endswith("norm.weight"):
            values = values + 1
        values = np.ascontiguousarray(values)
        if name == "rope_freqs.weight":
            writer.add_tensor(name, values)
            continue
        target = names.get_name(name, try_suffixes=(".weight", ".bias")) or unknown(name)
        if quantization is not None and values.ndim > 1 and values.shape[-1] % 32 == 0:
            packed = gguf.quants.quantize(values, quantization)
            writer.add_tensor(target, packed, raw_dtype=quantization)
        else:
            writer.add_tensor(target, values)


def interleaved(
    values: np.ndarray, config: transformers.PreTrainedConfig, queries: bool
) -> np.ndarray:
    """Rows of heads with neighbouring ones as pairs, which transformers keeps in two halves."""
    heads = config.num_attention_heads if queries else config.num_key_value_heads
    halves = values.reshape(heads, 2, -1, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)
