"""Gemma 3 as llama.cpp's converter writes it: weights, and the tokenizer's metadata."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, TokenType

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>"
    "{{ 'model' if message.role == 'assistant' else message.role }}\n{{ message.content }}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
"""Gemma's, in short: it writes BOS itself."""
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]
TURNS = ["<start_of_turn>", "<end_of_turn>"]
WORDS = ["  ", "   ", "\n", "▁", *"abcdefghijklmnoprstuvwxyz", "▁a", "us", "user", "mo", "model"]
BYTES = [f"<0x{i:02X}>" for i in range(256)]
TOKENS = [*SPECIAL, *TURNS, *BYTES, *WORDS]
KINDS = (
    [TokenType.CONTROL] * 3
    + [TokenType.UNKNOWN]
    + [TokenType.CONTROL] * 2
    + [TokenType.BYTE] * 256
    + [TokenType.USER_DEFINED] * 3
    + [TokenType.NORMAL] * (len(WORDS) - 3)
)


def write_gemma3(path: Path, model: Any, kind: GGMLQuantizationType) -> Path:
    """Norms are one more than the model's, and in fp32; `kind` is of matrices."""
    config = model.config
    assert config.vocab_size == len(TOKENS)
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_sliding_window(config.sliding_window)
    writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(TOKENS)
    writer.add_token_scores([-float(i) for i in range(len(TOKENS))])
    writer.add_token_types(KINDS)
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue  # tied
        values = np.ascontiguousarray(tensor.numpy())
        target = names.get_name(name, try_suffixes=(".weight",))
        if values.ndim == 1:
            writer.add_tensor(target, values + 1)
        else:
            writer.add_tensor(target, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
