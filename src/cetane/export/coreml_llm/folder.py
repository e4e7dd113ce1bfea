"""Writes the folder: packages, embeddings, rotary tables, config and tokenizer."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from cetane.bundle.rows import ROW_FORMATS
from cetane.checkpoint import Checkpoint
from cetane.checkpoint.tokenizer_files import TOKENIZER_FILES
from cetane.export.coreml_llm.contract import FULL, SLIDING, positions
from cetane.export.coreml_llm.planner import ContractPlanner, planners
from cetane.families import parse_config
from cetane.files import Progress, write_json
from cetane.lower.lower import Lowering
from cetane.lower.package import EXPORTER
from cetane.planner import Planner
from cetane.schema.recipe import Recipe

APP = "CoreML-LLM"
COMPILE = "for p in *.mlpackage; do xcrun coremlcompiler compile $p . && rm -r $p; done"
"""The command to run in the folder on a Mac: phones only load compiled packages."""
FILES: tuple[str, ...] = (
    "model_config.json",
    *(
        f"embed_tokens{table}_{part}.bin"
        for table in ("", "_per_layer")
        for part in ("q8", "scales")
    ),
    "per_layer_projection.bin",
    "per_layer_norm_weight.bin",
    *(f"{part}_{layers}.npy" for part in ("cos", "sin") for layers in (SLIDING, FULL)),
    *(f"hf_model/{name}" for name in ("config.json", *TOKENIZER_FILES)),
)
"""All files that a folder may hold beside its packages."""
HALVES = {
    "per_layer_projection.bin": "model.per_layer_model_projection.weight",
    "per_layer_norm_weight.bin": "model.per_layer_projection_norm.weight",
}
"""Files with a parameter of the model in fp16, by its name."""
ROWS = 1 << 12
"""The rows of an embedding that are in memory at a time."""


def export(recipe: Recipe, checkpoint: Checkpoint, folder: Path, progress: Progress) -> None:
    """Write the folder, which must not exist.

    It has prefill packages and verify functions if the recipe has these modes. Raises CetaneError
    for a model other than Gemma 4, and for a layout or contracts that their runtime lacks.
    """
    planner, *_ = made = planners(checkpoint, recipe)
    folder.mkdir(parents=True)
    parts = {
        name: partial(make, folder / f"{name}.mlpackage")
        for name, make in packages_of(made, checkpoint).items()
    }
    parts["embeddings"] = partial(write_embeddings, planner, checkpoint, folder)
    parts["rotary tables"] = partial(write_rotary, planner, folder)
    parts["config"] = partial(write_config, planner, checkpoint, folder)
    for done, (name, make) in enumerate(parts.items()):
        progress(name, done, len(parts))
        make()
    progress("done", len(parts), len(parts))


def packages(recipe: Recipe, checkpoint: Checkpoint) -> dict[str, Callable[[Path], None]]:
    """Functions that write the packages, by name. Raises CetaneError as `export`."""
    return packages_of(planners(checkpoint, recipe), checkpoint)


def packages_of(
    made: Sequence[ContractPlanner], checkpoint: Checkpoint
) -> dict[str, Callable[[Path], None]]:
    """The functions of `packages`, for planners."""
    return {
        name: partial(lowering.lower, shard)
        for planner in made
        for lowering in [Lowering(planner, checkpoint, {EXPORTER: checkpoint.model_name})]
        for shard, name in planner.names.items()
    }


def write_embeddings(planner: Planner, checkpoint: Checkpoint, folder: Path) -> None:
    """Write int8 rows and their fp16 scales; the config holds the factors."""
    tables = {
        "embed_tokens": planner.model.embedding,
        "embed_tokens_per_layer": planner.model.tables["per_layer"].table,
    }
    for name, table in tables.items():
        plain = replace(table, factor=1.0)
        rows = checkpoint.shape(table.weight)[0]
        part, scales = folder / f"{name}_q8.bin", folder / f"{name}_scales.bin"
        with part.open("wb") as to_values, scales.open("wb") as to_scales:
            for start in range(0, rows, ROWS):
                rows_read = plain.read(checkpoint, start, min(start + ROWS, rows)).numpy()
                made = ROW_FORMATS["int8"].encode(rows_read)
                to_values.write(made["values"].tobytes())
                to_scales.write(made["scales"].tobytes())
    for file, weight in HALVES.items():
        half = checkpoint.read(weight).to(torch.float16).numpy()
        (folder / file).write_bytes(half.tobytes())


def write_rotary(planner: Planner, folder: Path) -> None:
    """Write cosines and sines of each kind of layers, fp16 `(positions, D)`."""
    for name, table in planner.model.rotary.items():
        rows = table.cos_sin(positions(planner.recipe.cache.context)).numpy().astype(np.float16)
        for part, values in zip(("cos", "sin"), rows, strict=True):
            np.save(folder / f"{part}_{name}.npy", values)


def write_config(planner: ContractPlanner, checkpoint: Checkpoint, folder: Path) -> None:
    """`model_config.json`, and the checkpoint's own config and tokenizer beside it."""
    config = parse_config(checkpoint.config)
    tokenizer = checkpoint.tokenizer
    width = config.hidden_size_per_layer_input
    write_json(
        folder / "model_config.json",
        {
            "model_name": checkpoint.model_name.rpartition("/")[2],
            "architecture": "gemma4",
            "hidden_size": config.hidden_size,
            "context_length": planner.recipe.cache.context,
            "vocab_size": config.vocab_size,
            "bos_token_id": tokenizer.bos_id,
            # Of several. The runtime stops at 1 and 106, Gemma's end of a turn, whatever is here.
            "eos_token_id": min(tokenizer.eos_ids, default=None),
            "per_layer_dim": width,
            "num_layers": config.num_hidden_layers,
            "num_hidden_layers": config.num_hidden_layers,
            "sliding_window": config.sliding_window,
            "embed_scale": planner.model.embedding.factor,
            "per_layer_model_projection_scale": config.hidden_size**-0.5,
            "per_layer_input_scale": 2**-0.5,
            "per_layer_embed_scale": planner.model.tables["per_layer"].table.factor,
            "layer_types": config.layer_types,
            "num_kv_shared_layers": config.num_kv_shared_layers,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": planner.group("sliding").heads,
            "head_dim": planner.group("sliding").dim,
            "global_head_dim": planner.group("full").dim,
            "rms_norm_eps": config.rms_norm_eps,
            "final_logit_softcapping": config.final_logit_softcapping,
            "quantization": planner.recipe.compression.default,
            "compute_units": "CPU_AND_NE",
        },
    )
    (folder / "hf_model").mkdir()
    tokenizer.save(folder / "hf_model")
    write_json(folder / "hf_model" / "config.json", checkpoint.config)
