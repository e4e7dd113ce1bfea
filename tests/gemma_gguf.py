"""Gemma 3 as llama.cpp's converter writes it: weights, and the tokenizer's metadata."""

from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from tests.gguf_files import write_gguf

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
    """`kind` is of matrices."""
    assert model.config.vocab_size == len(TOKENS)
    return write_gguf(path, "gemma3", model, kind, add_tokenizer)


def add_tokenizer(writer: GGUFWriter) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(TOKENS)
    writer.add_token_scores([-float(i) for i in range(len(TOKENS))])
    writer.add_token_types(KINDS)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(TEMPLATE)
