"""Full-size Gemma 4 E2B from a synthetic bf16 checkpoint: seconds, peak memory, sizes of packages.

The checkpoint has E2B's real shapes and random weights; the build runs in a process of its own, so
that peak memory is its own. Sizes are compared with CoreML-LLM's published INT4 chunks.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from cetane.bundle import Bundle
from cetane.families import Model, author
from cetane.lab.models import zaya_tiny
from common import WORK, arguments, report
from zaya_full_build import build

CONFIG: dict[str, Any] = {
    "model_type": "gemma4_text", "vocab_size": 262144, "vocab_size_per_layer_input": 262144,
    "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35,
    "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512,
    "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 20, "use_double_wide_mlp": True,
    "sliding_window": 512, "final_logit_softcapping": 30.0, "tie_word_embeddings": True,
    "max_position_embeddings": 131072,
    "layer_types": ["sliding_attention" if (i + 1) % 5 else "full_attention" for i in range(35)],
}  # fmt: skip
PUBLISHED = {
    "gemma4-4chunk": (149, 128, 311, 503),
    "gemma4-3chunk": (149, 128 + 311, 503),
}
"""MiB of CoreML-LLM's INT4 chunks."""
ROWS = 1 << 14


def write_checkpoint(folder: Path) -> None:
    """A checkpoint with random weights, kept if it is there; tables are written in pieces."""
    if (folder / "config.json").exists():
        return
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(zaya_tiny() / name, folder)
    model: Model = author(CONFIG, "c1t", {}, None)  # type: ignore[arg-type]
    tables = {t.table.weight: (t.rows, t.channels) for t in model.tables.values()}
    tables[model.embedding.weight] = (model.vocab, model.hidden)
    shapes = {w.name: w.stored for b in model.layers for _, w in b.weights()}
    shapes[model.norm] = (model.hidden,)
    names: dict[str, str] = {}
    for layer in range(CONFIG["num_hidden_layers"]):
        prefix, file = f"model.layers.{layer}.", f"layer-{layer:02}.safetensors"
        mine = {n: s for n, s in shapes.items() if n.startswith(prefix)}
        save_file({n: draw(n, s) for n, s in mine.items()}, folder / file)
        names |= dict.fromkeys(mine, file)
    rest = {n: s for n, s in shapes.items() if n not in names}
    save_file({n: draw(n, s) for n, s in rest.items()}, folder / "rest.safetensors")
    names |= dict.fromkeys(rest, "rest.safetensors")
    for name, (rows, channels) in tables.items():
        file = f"{name}.safetensors"
        write_table(folder / file, name, rows, channels)
        names[name] = file
    index = {"weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(CONFIG))


def draw(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Random weights; gains and scalars near one."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    drawn = torch.randn(shape, generator=generator)
    matrix = len(shape) > 1
    return (drawn * shape[-1] ** -0.5 if matrix else 1 + drawn / 10).to(torch.bfloat16)


def write_table(path: Path, name: str, rows: int, channels: int) -> None:
    """One large tensor as a safetensors file, a piece at a time."""
    size = 2 * rows * channels
    entry = {"dtype": "BF16", "shape": [rows, channels], "data_offsets": [0, size]}
    header = json.dumps({name: entry}).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for start in range(0, rows, ROWS):
            piece = draw(f"{name} {start}", (min(ROWS, rows - start), channels))
            file.write(piece.view(torch.int16).numpy().tobytes())


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--recipes", nargs="+", default=list(PUBLISHED))
    options = parser.parse_args()
    checkpoint = Path(options.model)
    write_checkpoint(checkpoint)
    WORK.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {}
    rows = []
    for recipe in options.recipes:
        target = WORK / f"full-{recipe}"
        found = build(checkpoint, recipe, target)
        bundle = Bundle(target)
        found["mebibytes"] = sizes = {
            shard.name: sum(
                f.stat().st_size for f in bundle.shard(shard.name).rglob("*") if f.is_file()
            )
            / 2**20
            for shard in bundle.plan.shards
        }
        shutil.rmtree(target)
        result[recipe] = found
        for (shard, size), published in zip(sizes.items(), PUBLISHED[recipe], strict=True):
            rows.append([recipe, shard, size, published, size / published - 1,
                         found["shards"].get(shard, 0.0), found["gigabytes"]])  # fmt: skip
        print(json.dumps({recipe: found}), file=sys.stderr)
    columns = ["recipe", "package", "MiB", "published", "difference", "seconds", "peak GB"]
    report("Gemma 4 E2B, synthetic weights", columns, rows, result, options.json)


if __name__ == "__main__":
    main()
