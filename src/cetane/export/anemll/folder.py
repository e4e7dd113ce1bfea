"""Writes the folder: packages, `meta.yaml`, tokenizer, config, and a script that compiles."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from cetane.checkpoint import Checkpoint, Tokenizer
from cetane.checkpoint.tokenizer_files import TOKENIZER_FILES
from cetane.export.anemll.contract import META, assumes_window
from cetane.export.anemll.planner import EMBEDDINGS, LM_HEAD, AnemllPlanner
from cetane.families import parse_config
from cetane.files import Progress, read_json, write_json
from cetane.lower.lower import Lowering
from cetane.lower.package import EXPORTER, enumerate_shapes
from cetane.schema.recipe import Recipe

APP = "ANEMLL"
COMPILE = "sh compile.sh"
"""The command to run in the folder on a Mac: the app only loads compiled packages."""
SCRIPT = """#!/bin/sh
# Compiles every package in this folder, and removes it. Needs Xcode.
set -e
cd "$(dirname "$0")"
for package in *.mlpackage; do
    [ -e "$package" ] || continue  # all are compiled
    xcrun coremlcompiler compile "$package" .
    rm -r "$package"
done
"""
FILES: tuple[str, ...] = (META, "config.json", "compile.sh", *TOKENIZER_FILES)
"""All files that a folder may hold beside its packages."""


def export(recipe: Recipe, checkpoint: Checkpoint, folder: Path, progress: Progress) -> None:
    """Write the folder, which must not exist.

    Raises CetaneError for a model or a recipe that their hosts cannot run.
    """
    planner = AnemllPlanner(checkpoint, recipe)
    makers = packages_of(planner, checkpoint)
    folder.mkdir(parents=True)
    for done, (name, make) in enumerate(makers.items()):
        progress(name, done, len(makers) + 1)
        make(folder / f"{name}.mlpackage")
    progress("config", len(makers), len(makers) + 1)
    write_meta(planner, checkpoint.model_name, folder / META)
    write_tokenizer(checkpoint.tokenizer, checkpoint.config, folder)
    (folder / "compile.sh").write_text(SCRIPT)
    progress("done", len(makers) + 1, len(makers) + 1)


def packages(recipe: Recipe, checkpoint: Checkpoint) -> dict[str, Callable[[Path], None]]:
    """Functions that write the packages, by name. Raises CetaneError as `export`."""
    return packages_of(AnemllPlanner(checkpoint, recipe), checkpoint)


def packages_of(
    planner: AnemllPlanner, checkpoint: Checkpoint
) -> dict[str, Callable[[Path], None]]:
    """The functions of `packages`, for a planner."""
    lowering = Lowering(planner, checkpoint, {EXPORTER: checkpoint.model_name})

    def make(shard: str, number: int, package: Path) -> None:
        lowering.lower(shard, package, metadata(planner, shard, number))
        if shard == EMBEDDINGS:
            enumerate_shapes(package)

    return {
        name: partial(make, shard, number)
        for number, (shard, name) in enumerate(planner.names.items())
    }


def metadata(planner: AnemllPlanner, shard: str, number: int) -> dict[str, str]:
    """ANEMLL's keys in a package's metadata. `chunk_no` counts from 1."""
    sizes = planner.sizes
    keys = {
        "context_length": sizes.context,
        "state_length": sizes.context,
        "batch_size": sizes.batch,
        "num_chunks": len(planner.chunks),
        **({"chunk_no": number} if shard in planner.chunks else {}),
        "vocab_size": sizes.vocab,
    }
    return {f"com.anemll.{key}": str(value) for key, value in keys.items()}


def write_meta(planner: AnemllPlanner, model: str, path: Path) -> None:
    """`meta.yaml`, from which both hosts read the names of packages and the sizes."""
    sizes, names = planner.sizes, planner.names
    chunk = names[next(iter(planner.chunks))]
    prefix = names[EMBEDDINGS].removesuffix("_embeddings")
    parameters = {
        "context_length": sizes.context,
        "batch_size": sizes.batch,
        "lut_embeddings": "none",
        "lut_ffn": "none",
        "lut_lmhead": "none",
        "num_chunks": len(planner.chunks),
        "model_prefix": prefix,
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
    elif assumes_window(prefix, sizes.context):  # a window that no position leaves
        parameters["sliding_window"] = sizes.context
    content = {
        "model_info": {
            "name": f"anemll-{model.rpartition('/')[2]}-ctx{sizes.context}",
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
    """Write the tokenizer and the config.

    The chat template goes into `tokenizer_config.json`: the app downloads no other file with one.
    If there is one for tools too, both have names there. The config gets the tokenizer's stop
    tokens. It also says which layers slide, since older configs leave that to transformers.
    """
    tokenizer.save(folder)
    if tokenizer.has_chat_template:
        path = folder / "tokenizer_config.json"
        named = [{"name": name, "template": text} for name, text in tokenizer.templates.items()]
        template = tokenizer.chat_template if tokenizer.tool_template is None else named
        write_json(path, read_json(path) | {"chat_template": template})
    parsed = parse_config(dict(config))
    stated = {
        key: value
        for key in ("layer_types", "sliding_window")
        if (value := getattr(parsed, key, None)) is not None
    }
    eos = {"eos_token_id": list(tokenizer.eos_ids)}
    write_json(folder / "config.json", dict(config) | stated | eos)
