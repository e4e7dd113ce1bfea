"""Fuzzers of what describes a folder for another runtime."""

import hashlib
from collections.abc import Callable
from pathlib import Path

from tests.fuzz.fuzzer import Document

from cetane.errors import CetaneError


def refuse(path: Path, check: Callable[[Path], list[str]]) -> None:
    """Raise CetaneError for a problem of this file: the folder's others are missing."""
    for problem in check(path.parent):
        if problem.startswith(path.name):
            raise CetaneError(problem)


def meta() -> Document:
    """The `meta.yaml` of a folder for ANEMLL. JSON is YAML too."""
    from cetane.export.anemll.check import check

    parameters = {
        "context_length": 512, "batch_size": 64, "num_chunks": 2, "split_lm_head": 8,
        "vocab_size": 400, "lm_head_chunk_sizes": [50] * 8,
        "lut_embeddings": "none", "lut_ffn": "none", "lut_lmhead": "none", "model_prefix": "llama",
        "embeddings": "llama_embeddings.mlmodelc", "lm_head": "llama_lm_head.mlmodelc",
        "ffn": "llama_FFN_PF_chunk_01of02.mlmodelc", "argmax_in_model": True,
        "prefill_dynamic_slice": True,
    }  # fmt: skip

    def read(path: Path) -> None:
        (path.parent / "config.json").write_text('{"hidden_size": 32}')
        refuse(path, check)

    return Document("meta.yaml", [{"model_info": {"parameters": parameters}}], read)


def model_config() -> Document:
    """The config of a folder for CoreML-LLM."""
    from cetane.export.coreml_llm.check import check

    content = {
        "context_length": 512, "vocab_size": 400, "hidden_size": 64, "num_layers": 2,
        "per_layer_dim": 16, "sliding_window": 256, "head_dim": 32, "global_head_dim": 64,
        "num_key_value_heads": 1, "num_kv_shared_layers": 1, "embed_scale": 8.0,
        "per_layer_embed_scale": 4.0, "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    return Document("model_config.json", [content], lambda path: refuse(path, check))


def origin() -> Document:
    """The list of a folder's files, and of the bundle with which they were compared."""
    from cetane.pipeline.runtime_folder import changed_files

    text = b"a file"
    record = {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}

    def read(path: Path) -> None:
        (path.parent / "a.txt").write_bytes(text)
        for problem in changed_files(path.parent, ()):
            raise CetaneError(problem)

    content = {"bundle": "ab" * 32, "files": {"a.txt": record}}
    return Document("cetane.json", [content], read)
