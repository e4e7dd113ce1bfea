"""Writes the folder: packages, `meta.yaml`, tokenizer, config, and a script that compiles."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint, Tokenizer
from cetane.errors import CetaneError
from cetane.export.anemll.contract import FolderSizes
from cetane.export.anemll.planner import EMBEDDINGS, LM_HEAD, AnemllPlanner
from cetane.files import Progress, read_json, replacing, write_json
from cetane.lower.lower import Lowering
from cetane.lower.package import enumerate_shapes

COMPILE = "sh compile.sh"
"""The command to run in the folder on a Mac: the app only loads compiled packages."""
SCRIPT = """#!/bin/sh
# Compiles every package in this folder, and removes it. Needs Xcode.
set -e
cd "$(dirname "$0")"
for package in *.mlpackage; do
    xcrun coremlcompiler compile "$package" .
    rm -r "$package"
done
"""
META = "meta.yaml"


def export(bundle: Bundle, checkpoint: Checkpoint, target: Path, progress: Progress) -> None:
    """Write the folder; `target` must not exist.

    Raises CetaneError for a model or a recipe that their hosts cannot run.
    """
    planner = AnemllPlanner(checkpoint, bundle.plan.recipe)
    lowering = Lowering(planner, checkpoint)
    with replacing(target) as folder:
        folder.mkdir(parents=True)
        for done, (shard, name) in enumerate(planner.names.items()):
            progress(name, done, len(planner.names) + 1)
            package = folder / f"{name}.mlpackage"
            lowering.lower(shard, package)
            if shard == EMBEDDINGS:
                enumerate_shapes(package)
        progress("config", len(planner.names), len(planner.names) + 1)
        write_meta(planner, Path(checkpoint.source).name, folder / META)
        write_tokenizer(checkpoint.tokenizer, checkpoint.config, folder)
        (folder / "compile.sh").write_text(SCRIPT)
        progress("done", len(planner.names) + 1, len(planner.names) + 1)


def write_meta(planner: AnemllPlanner, model: str, path: Path) -> None:
    """`meta.yaml`, from which both hosts read the names of packages and the sizes."""
    sizes, names = planner.sizes, planner.names
    chunk = names[next(iter(planner.chunks))]
    parameters = {
        "context_length": sizes.context,
        "batch_size": sizes.batch,
        "lut_embeddings": "none",
        "lut_ffn": "none",
        "lut_lmhead": "none",
        "num_chunks": len(planner.chunks),
        "model_prefix": names[EMBEDDINGS].removesuffix("_embeddings"),
        "embeddings": f"{names[EMBEDDINGS]}.mlmodelc",
        "lm_head": f"{names[LM_HEAD]}.mlmodelc",
        "ffn": f"{chunk}.mlmodelc",
        "split_lm_head": sizes.parts,
        "vocab_size": sizes.vocab,
        "lm_head_chunk_sizes": [sizes.rows] * sizes.parts,
        "prefill_dynamic_slice": True,  # without it, chat.py feeds prompts token by token
    }
    if sizes.choose:
        parameters["argmax_in_model"] = True
    if sizes.window:
        parameters["sliding_window"] = sizes.window
    content = {
        "model_info": {
            "name": f"anemll-{model}-ctx{sizes.context}",
            "version": "0.3.5",
            "description": f"{model} on Apple's Neural Engine, made by cetane",
            "author": "cetane",
            "framework": "Core ML",
            "language": "Python",
            "architecture": planner.architecture,
            "parameters": parameters,
        }
    }
    path.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True), "utf-8")


def write_tokenizer(tokenizer: Tokenizer, config: Mapping[str, Any], folder: Path) -> None:
    """The tokenizer, with its chat template in `tokenizer_config.json`: the app downloads no other
    file with one. The config's stop tokens are the tokenizer's."""
    tokenizer.save(folder)
    if tokenizer.chat_template is not None:
        path = folder / "tokenizer_config.json"
        write_json(path, read_json(path) | {"chat_template": tokenizer.chat_template})
    write_json(folder / "config.json", dict(config) | {"eos_token_id": list(tokenizer.eos_ids)})
