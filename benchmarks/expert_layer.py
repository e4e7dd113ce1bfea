"""Seconds and peak memory of building one full-size layer of experts, with random weights.

python benchmarks/expert_layer.py [qwen3-30b-a3b] [gpt-oss-20b] [--work FOLDER]

The layer is routed: decoding calls a function for each group of experts. Qwen's weights are bf16,
one expert a tensor; gpt-oss's are mxfp4, as released. The vocabulary is small, so that the figures
are the layer's.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

VOCABULARY = 1024
SIZES: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": True,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128,
        "quantization_config": {"quant_method": "mxfp4"},
    },
}  # fmt: skip
"""Sizes as the config.json of each release has them."""
TOGETHER = {"qwen3-30b-a3b": 16, "gpt-oss-20b": 4}
"""Experts of a function: eight functions for a layer and width."""


def tensors(config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a checkpoint of one layer, with random values."""
    from transformers import AutoConfig, AutoModelForCausalLM

    plain = {k: v for k, v in config.items() if k != "quantization_config"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**plain))
    draw = torch.Generator().manual_seed(0)
    for name, tensor in model.state_dict().items():
        shape = tuple(tensor.shape)
        if "experts" in name and name.endswith("_proj"):
            yield from experts(name, shape, config, draw)
        else:
            spread = shape[-1] ** -0.5 if len(shape) > 1 else 0.1
            values = torch.randn(shape, generator=draw) * spread
            yield name, (values + (1 if "norm" in name else 0)).bfloat16()


def experts(
    name: str, shape: tuple[int, ...], config: dict[str, Any], draw: torch.Generator
) -> Iterator[tuple[str, torch.Tensor]]:
    """The experts' weights, one by one or in mxfp4."""
    count, first, second = shape
    if "quantization_config" in config:
        blocks = torch.randint(0, 256, (count, second, first // 32, 16), generator=draw)
        yield f"{name}_blocks", blocks.to(torch.uint8)
        yield f"{name}_scales", torch.full((count, second, first // 32), 119, dtype=torch.uint8)
        return
    prefix = name.rpartition(".")[0]
    parts = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
    for number in range(count):
        for part in parts:
            values = torch.randn(first // len(parts), second, generator=draw) * second**-0.5
            yield f"{prefix}.{number}.{part}.weight", values.bfloat16()


def write(folder: Path, name: str) -> None:
    """A checkpoint of one layer. An existing one is kept."""
    config = SIZES[name] | {
        "num_hidden_layers": 1, "vocab_size": VOCABULARY, "max_position_embeddings": 4096,
        "bos_token_id": None, "eos_token_id": 0, "pad_token_id": None,
    }  # fmt: skip
    if (folder / "tokenizer.json").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    save_file({n: t.contiguous() for n, t in tensors(config)}, folder / "model.safetensors")
    tokenizer = Tokenizer(models.WordLevel({f"t{n}": n for n in range(VOCABULARY)}, "t0"))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(config))


MEASURE = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=sys.stderr)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024)
"""


def peak_of(command: list[str]) -> float:
    """The peak memory of a command, in MB; a process of its own keeps ours out of it."""
    measuring = [sys.executable, "-c", MEASURE, *command]
    return float(subprocess.run(measuring, check=True, stdout=subprocess.PIPE).stdout)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", choices=[[], *SIZES], default=list(SIZES))
    parser.add_argument("--work", type=Path, default=Path("build/bench/expert-layer"))
    arguments = parser.parse_args()
    print("| layer | checkpoint, MB | packages, MB | functions | build, s | peak memory, MB |")
    print("| --- |" + " ---: |" * 5)
    for name in arguments.names or SIZES:
        folder, bundle = arguments.work / name, arguments.work / f"{name}-bundle"
        write(folder, name)
        settings = {
            "layout.kind": "per-layer", "layout.routed": ["decode"],
            "family.together": TOGETHER[name], "cache.context": 512, "tokens.verify": 0,
            "compression.default": "int8-per-channel", "family.residual_scale": 1.0,
        }  # fmt: skip
        command = [sys.executable, "-m", "cetane", "build", str(folder), "-r", "int8", "--force"]
        command += [f"--set={key}={json.dumps(value)}" for key, value in settings.items()]
        started = time.perf_counter()
        peak = peak_of([*command, "-o", str(bundle)])
        seconds = time.perf_counter() - started
        stored = (folder / "model.safetensors").stat().st_size
        made = sum(path.stat().st_size for path in bundle.rglob("*.bin"))
        shards = json.loads((bundle / "manifest.json").read_text())["plan"]["shards"]
        functions = sum(len(shard["functions"]) for shard in shards)
        cells = f"{stored / 1e6:,.0f} | {made / 1e6:,.0f} | {functions} | {seconds:.0f}"
        print(f"| {name} | {cells} | {peak:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
