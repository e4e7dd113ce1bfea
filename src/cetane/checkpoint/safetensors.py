"""Checkpoints in Hugging Face's form: config.json, safetensors, tokenizer.json."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cetane.checkpoint.checkpoint import Checkpoint
from cetane.checkpoint.dtypes import to_torch
from cetane.checkpoint.experts import stack_experts
from cetane.checkpoint.quantized import QuantizedTensor, dequantized
from cetane.checkpoint.safetensors_files import (
    folder_tensors,
    gguf_hint,
    read_header,
    snapshot_hint,
)
from cetane.checkpoint.stored_tensors import (
    Identity,
    JoinedTensor,
    StoredTensor,
    identity_of,
    read_range,
)
from cetane.checkpoint.text_part import has_text_part, text_config, text_tensors
from cetane.checkpoint.tokenizer import Tokenizer
from cetane.checkpoint.tokenizer_files import TOKENIZER_FILES
from cetane.checkpoint.zaya_original import hf_config, hf_tensors, is_original
from cetane.errors import CetaneError
from cetane.files import read_json

if TYPE_CHECKING:
    import torch

_PREFIX = "model."
EMBEDDING, HEAD = f"{_PREFIX}embed_tokens.weight", "lm_head.weight"
_BACKBONE = "backbone."
NEOX_EMBEDDING, _NEOX_HEAD = "gpt_neox.embed_in.weight", "embed_out.weight"
GPT2_EMBEDDING, OPT_EMBEDDING = "transformer.wte.weight", "model.decoder.embed_tokens.weight"
MAMBA_EMBEDDING = f"{_BACKBONE}embeddings.weight"
FALCON_EMBEDDING = "transformer.word_embeddings.weight"
EMBEDDINGS = (
    EMBEDDING, NEOX_EMBEDDING, GPT2_EMBEDDING, OPT_EMBEDDING, MAMBA_EMBEDDING, FALCON_EMBEDDING,
)  # fmt: skip
_COMMON = {
    "n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings", "num_heads": "num_attention_heads",
    "num_layers": "num_hidden_layers",
}  # fmt: skip
_OWN_NAMES = ("codegen", "exaone", "gpt2", "gpt_bigcode", "gpt_neo", "gptj")
"""The model types that name some common keys otherwise."""
_LFM2_TIE = "tie_embedding"
_RENAMED = {
    ".block_sparse_moe.gate.": ".mlp.gate.",
    ".block_sparse_moe.router.layer.": ".block_sparse_moe.router.",
    ".block_sparse_moe.input_linear.weight": ".block_sparse_moe.experts.gate_up_proj",
    ".block_sparse_moe.output_linear.weight": ".block_sparse_moe.experts.down_proj",
    ".mlp.moe_statics.": ".mlp.gate.moe_statics.",
    ".mlp.e_score_correction_bias": ".mlp.gate.e_score_correction_bias",
}
"""Parts of names on disk, and transformers' for them: of Mixtral, Granite-MoE, ERNIE and EXAONE."""
_OLDER_MAMBA = {"backbone.embedding.": "backbone.embeddings."}
_RENAMED_OF = {
    "exaone": {
        "transformer.wte.": "model.embed_tokens.",
        "transformer.h.": "model.layers.",
        "transformer.ln_f.": "model.norm.",
        ".ln_1.": ".input_layernorm.",
        ".ln_2.": ".post_attention_layernorm.",
        ".attn.attention.out_proj.": ".self_attn.o_proj.",
        ".attn.attention.": ".self_attn.",
        ".mlp.c_fc_0.": ".mlp.gate_proj.",
        ".mlp.c_fc_1.": ".mlp.up_proj.",
        ".mlp.c_proj.": ".mlp.down_proj.",
    },
    "hy_v3": {
        ".mlp.router.gate.": ".mlp.gate.",
        ".mlp.expert_bias": ".mlp.e_score_correction_bias",
        ".mlp.e_score_correction_bias": ".mlp.e_score_correction_bias",  # not in the router
        ".mlp.shared_mlp.": ".mlp.shared_experts.",
    },
    "lfm3": {".self_attn.gate_proj.": ".self_attn.g_proj."},
    "mamba": _OLDER_MAMBA,
    "mamba2": _OLDER_MAMBA,
    "minimax_m2": {
        ".block_sparse_moe.e_score_correction_bias": ".mlp.e_score_correction_bias",
        ".mlp.e_score_correction_bias": ".mlp.e_score_correction_bias",  # not in the router
    },
    "phimoe": {".block_sparse_moe.gate.": ".mlp.router."},
    "olmo_hybrid": {
        ".attention_layer_norm.": ".input_layernorm.",
        ".feedforward_layer_norm.": ".post_attention_layernorm.",
    },
}
"""The same for one model type each."""
_Q_TAPS = ".q_conv1d.weight"
"""The end of the name of taps of queries, on disk."""
PIECE = 1 << 22
"""Bytes that are compared at a time."""


class SafetensorsCheckpoint(Checkpoint):
    """A folder in the form of `save_pretrained`, or in Zyphra's own form of ZAYA.

    Of a multimodal model it has only the text part.
    """

    folder: Path

    def __init__(self, source: str, folder: Path, tensors: dict[str, StoredTensor]) -> None:
        path = folder / "config.json"
        config = read_json(path)
        if "configuration_files" in config:
            raise CetaneError(
                f"{path} names other files for versions of transformers: configuration_files",
                "make config.json of the file for your version, without that key",
            )
        self.folder = folder
        self._in_files = tensors  # under the files' own names
        tensors, config, quantization = dequantized(tensors, config, path)
        if is_original(config):
            config = hf_config(config, path)
            tensors = hf_tensors(tensors, config, path)
        elif has_text_part(config):
            self.part_of = str(config["model_type"])
            config, tensors = text_config(config, path), text_tensors(tensors, path)
        else:
            config, tensors = as_whole_model(config), with_prefix(tensors, config.get("model_type"))
        tensors = renamed(tensors, config.get("model_type"))
        tensors = stack_experts(joined_taps(tensors, path), path)
        if config.get("tie_word_embeddings") is not False and has_own_head(tensors):
            config = config | {"tie_word_embeddings": False}
        super().__init__(source, config, tensors)
        self.quantization = quantization
        if folder.parent.name == "snapshots":  # the hub's cache names folders for commits
            self.revision = folder.name

    @classmethod
    def open(
        cls, folder: Path, weights: Path | None = None, source: str | None = None
    ) -> SafetensorsCheckpoint:
        """Open `folder`, or only the file `weights` in it. CetaneError names the file at fault."""
        if not (folder / "config.json").is_file():
            refuse_adapter(folder)
            refuse_bundle(folder)
            raise CetaneError(
                f"{folder} has no config.json",
                gguf_hint(folder) or snapshot_hint(folder) or "give the folder that holds it",
            )
        tensors = folder_tensors(folder) if weights is None else read_header(weights)
        return cls(source or str(weights or folder), folder, tensors)

    def read(self, name: str) -> torch.Tensor:
        return read_tensor(self._stored(name))

    def _read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        return read_tensor(self._stored(name).rows(start, stop))

    def _load_tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.folder)

    def identified(self, identity: Identity) -> str:
        shards = sorted({tensor.file for tensor in self._in_files.values()}, key=str)
        others = [self.folder / name for name in ("config.json", *TOKENIZER_FILES)]
        digest = hashlib.sha256()
        for file in shards:
            digest.update(identity_of(file, identity).encode())
        for path in filter(Path.is_file, others):
            digest.update(self._identity_beside(path, identity).encode())
        for name, tensor in sorted(self._in_files.items()):
            digest.update(f"{name} {tensor.file.name} {tensor.offset} {tensor.nbytes} ".encode())
            digest.update(f"{tensor.shape} {tensor.dtype}\n".encode())
        return digest.hexdigest()

    def _identity_beside(self, path: Path, identity: Identity) -> str:
        """The identity of a file beside the weights."""
        return identity(path)


def as_whole_model(config: dict[str, Any]) -> dict[str, Any]:
    """The config of a model that is no part of another one.

    A Mistral that says which layers slide is a Ministral: `AutoConfig.from_pretrained` changes its
    type. A Mistral has one kind of layers, and would ignore it. LFM2 has a second name for the tie
    of its head. It would win over the common name that cetane sets for a head of its own. GPT-2,
    its relatives and EXAONE have names of their own for common keys. transformers ties no head of a
    Nemotron-H, whatever its config says.
    """
    kind = config.get("model_type")
    if kind == "mistral" and "layer_types" in config:
        return config | {"model_type": "ministral"}
    if kind == "nemotron_h":
        return config | {"tie_word_embeddings": False}
    if kind in ("lfm2", "lfm2_moe") and _LFM2_TIE in config:
        rest = {key: value for key, value in config.items() if key != _LFM2_TIE}
        return rest | {"tie_word_embeddings": config[_LFM2_TIE]}
    if kind in _OWN_NAMES:
        return {_COMMON.get(key, key): value for key, value in config.items()}
    return config


def with_prefix(tensors: dict[str, StoredTensor], kind: Any) -> dict[str, StoredTensor]:
    """The tensors by the names of a model of the type `kind` with a head.

    A model without a head is saved without `model.` in front, or what else stands there.
    transformers loads it into one with a head too. Files of GPT-NeoX have the head under a name of
    its own, and those of Nemotron-H have `backbone.` in place of `model.`.
    """
    if kind == "nemotron_h":
        return {without_backbone(name): tensor for name, tensor in tensors.items()}
    if NEOX_EMBEDDING in tensors:
        return {HEAD if name == _NEOX_HEAD else name: t for name, t in tensors.items()}
    for table in EMBEDDINGS:
        prefix, _, bare = table.partition(".")
        if bare in tensors and table not in tensors:
            named = tensors.items()
            return {n if n.startswith("lm_head.") else f"{prefix}.{n}": t for n, t in named}
    return tensors


def renamed(tensors: Mapping[str, StoredTensor], kind: Any) -> dict[str, StoredTensor]:
    """The tensors of a model of the type `kind` by transformers' names, where those on disk are
    others."""
    made, names = {}, _RENAMED | _RENAMED_OF.get(str(kind), {})
    for name, tensor in tensors.items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        made[name] = tensor
    return made


def joined_taps(tensors: dict[str, StoredTensor], path: Path) -> dict[str, StoredTensor]:
    """The tensors, with the taps of queries, keys and values of an OLMo Hybrid in one.

    `path` is the checkpoint's config.json. Raises CetaneError for taps that are missing or differ.
    """
    homes = [name.removesuffix(_Q_TAPS) for name in tensors if name.endswith(_Q_TAPS)]
    if not homes:
        return tensors
    made = dict(tensors)
    for home in homes:
        parts = [made.pop(f"{home}.{letter}_conv1d.weight", None) for letter in "qkv"]
        found = tuple(part for part in parts if part is not None)
        if len(found) < 3 or len({(part.shape[1:], part.dtype) for part in found}) > 1:
            raise CetaneError(
                f"{path.parent}: the taps of q, k and v of {home} are not all there, or differ",
                "download the rest, or load the model with transformers and save it in one dtype",
            )
        made[f"{home}.conv1d.weight"] = JoinedTensor.join(found)
    return made


def without_backbone(name: str) -> str:
    """transformers' name of a tensor, by that of a Nemotron-H on disk."""
    return f"{_PREFIX}{name.removeprefix(_BACKBONE)}" if name.startswith(_BACKBONE) else name


def has_own_head(tensors: Mapping[str, StoredTensor]) -> bool:
    """Whether a head is stored that is not the embedding's table.

    A config may say that they are tied; transformers 5 ties them only if they are equal
    (`PreTrainedModel.tie_weights`). Both are read up to the first piece that differs.
    """
    head = tensors.get(HEAD)
    table = next((tensors[name] for name in EMBEDDINGS if name in tensors), None)
    if head is None or table is None:
        return False
    if (head.shape, head.stored_as) != (table.shape, table.stored_as):
        return True
    if isinstance(head, QuantizedTensor):  # decoding two tables only to compare them takes long
        return True
    pieces = [(at, min(PIECE, head.nbytes - at)) for at in range(0, head.nbytes, PIECE)]
    return any(
        read_range(head.file, head.offset + at, size)
        != read_range(table.file, table.offset + at, size)
        for at, size in pieces
    )


def read_tensor(stored: StoredTensor) -> torch.Tensor:
    """The tensor in its stored dtype; a quantised weight in fp32."""
    return stored.values() if isinstance(stored, QuantizedTensor) else to_torch(stored)


def refuse_adapter(folder: Path) -> None:
    """Raise CetaneError, which names the base, if a folder holds an adapter of peft or mlx-lm."""
    path = folder / "adapter_config.json"
    if path.is_file():
        config = read_json(path)
        base = config.get("base_model_name_or_path") or config.get("model") or "its base model"
        raise CetaneError(
            f"{folder} holds an adapter, not a model", f"give {base}, and add --lora {folder}"
        )


def refuse_bundle(folder: Path) -> None:
    """Raise CetaneError, which names the model, if a folder holds a bundle."""
    path = folder / "manifest.json"
    if path.is_file() and (source := read_json(path).get("source")):
        raise CetaneError(
            f"{folder} holds a bundle, not a model", f"give the model that it was made of: {source}"
        )
