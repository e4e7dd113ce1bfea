"""Full-size ZAYA1-8B layers from a synthetic sharded bf16 checkpoint, beside coremltools' own way.

The checkpoint has ZAYA1-8B's real shapes and random weights. Every part runs in a process of its
own, so that peak memory is that part's; `--layers 40` builds all 80 blocks.
"""

import json
import shutil
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from cetane.bundle import Bundle
from cetane.checkpoint import open_checkpoint
from cetane.families import author
from cetane.lab.models import zaya_tiny
from cetane.lower.lower import Lowering
from cetane.planner import Planner
from cetane.schema.recipe import load_recipe
from common import WORK, arguments, report

CONFIG: dict[str, Any] = {
    "model_type": "zaya", "vocab_size": 262272, "hidden_size": 2048,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128,
    "moe_intermediate_size": 2048, "num_experts": 16, "num_experts_per_tok": 1,
    "router_hidden_size": 256, "cca_time0": 2, "cca_time1": 2, "max_position_embeddings": 131072,
}  # fmt: skip
RECIPES = ("zaya-int8", "zaya-int4-uniform", "zaya-int4")
COREMLTOOLS = {"zaya-int8": "int8", "zaya-int4-uniform": "uniform", "zaya-int4": "kmeans"}

PEAK = """
import atexit, sys
from cetane.cli import main
status = lambda: [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
atexit.register(lambda: print(*status(), file=sys.stderr))
main()
"""
"""The command line, which at its end tells its own peak memory."""


def write_checkpoint(folder: Path, layers: int) -> None:
    """A checkpoint with random weights, one file a layer; kept if it is there."""
    done = folder / "model.safetensors.index.json"
    if done.exists():
        held = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
        if held != layers:
            raise SystemExit(f"{folder} has {held} layers, not {layers}: name another folder")
        return
    if folder.exists():
        raise SystemExit(f"{folder} is not a checkpoint of this script: name another folder")
    folder.mkdir(parents=True)
    config = CONFIG | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(zaya_tiny() / name, folder)
    pool = torch.randn(2**27, generator=torch.manual_seed(1)).to(torch.bfloat16)
    at = 0

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        """Random weights: another place of one pool for each tensor, by which no two are equal."""
        nonlocal at
        count = int(np.prod(shape))
        at = (at * 31 + 7919) % (len(pool) // 2)
        scale = (shape[-1] if len(shape) > 1 else 2500) ** -0.5
        taken = pool[at : at + count] if count <= len(pool) // 2 else pool.repeat(
            -(-count // len(pool)))[:count]  # fmt: skip
        return (taken * scale).reshape(shape)

    names: dict[str, str] = {}

    def save(file: str, shapes: dict[str, tuple[int, ...]]) -> None:
        save_file({name: draw(shape) for name, shape in shapes.items()}, folder / file)
        names.update(dict.fromkeys(shapes, file))

    model = author(config, "c1t", {}, None)  # type: ignore[arg-type]
    table = model.embedding
    hidden = (CONFIG["hidden_size"],)
    save("embedding.safetensors", {
        table.weight: (CONFIG["vocab_size"], *hidden), str(table.bias): hidden,
        str(table.scale): hidden, model.norm: hidden,
    })  # fmt: skip
    for layer in range(layers):
        blocks = [block for block in model.layers if block.layer == layer]
        shapes = {w.name: w.stored for block in blocks for _, w in block.weights()}
        save(f"layer-{layer:02}.safetensors", shapes)
        print(f"checkpoint: layer {layer}", file=sys.stderr)
    done.write_text(json.dumps({"weight_map": names}))


def build(checkpoint: Path, recipe: str, target: Path) -> dict[str, Any]:
    """Seconds by shard, and peak memory, of `cetane build`; whatever is at the target goes."""
    for folder in (target, target.with_name(target.name + ".partial")):
        shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-c", PEAK, "build", str(checkpoint), "-r", recipe, "-o",
               str(target)]  # fmt: skip
    started = time.perf_counter()
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    assert process.stderr is not None
    steps: list[tuple[str, float]] = []
    for line in process.stderr:
        if line.startswith("VmHWM"):
            peak = int(line.split()[1]) / 1e6
        if line.startswith("build: ") and "(" in line:
            steps.append((line.split()[1], time.perf_counter()))
    if process.wait():
        raise SystemExit(f"build of {recipe} failed")
    seconds = {a[0]: b[1] - a[1] for a, b in pairwise(steps)}
    shards = {Path(name).stem: s for name, s in seconds.items() if name.startswith("shards/")}
    return {"seconds": time.perf_counter() - started, "shards": shards,
            "gigabytes": peak}  # fmt: skip


def coremltools_layer(kind: str, target: Path) -> dict[str, float]:
    """Seconds to convert one MoE layer's experts and router, and to compress them, with
    coremltools' own passes: one function of flexible T, as the published port did."""
    from cetane.hardware.quiet import import_coremltools

    ct = import_coremltools()
    cto = ct.optimize.coreml
    hidden, inner, experts, router = 2048, 2048, 16, 256

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            conv = torch.nn.Conv2d
            self.up = torch.nn.ModuleList(conv(hidden, 2 * inner, 1, bias=False)
                                          for _ in range(experts))  # fmt: skip
            self.down = torch.nn.ModuleList(conv(inner, hidden, 1, bias=False)
                                            for _ in range(experts))  # fmt: skip
            self.router = torch.nn.Sequential(
                conv(hidden, router, 1), conv(router, router, 1), torch.nn.GELU(),
                conv(router, router, 1), torch.nn.GELU(), conv(router, experts + 1, 1, bias=False),
            )  # fmt: skip

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights, y = self.router(x).softmax(1), torch.zeros_like(x)
            for index, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
                gate, value = up(x).chunk(2, 1)
                y = y + down(torch.nn.functional.silu(gate) * value) * weights[:, index : index + 1]
            return y

    started = time.perf_counter()
    example = torch.zeros(1, hidden, 1, 1)
    with torch.no_grad():
        traced = torch.jit.trace(Layer().eval(), example)
    shape = (1, hidden, 1, ct.RangeDim(1, 4, 1))
    model = ct.convert(
        traced, inputs=[ct.TensorType(name="x", shape=shape, dtype=np.float16)],
        outputs=[ct.TensorType(dtype=np.float16)], minimum_deployment_target=ct.target.iOS18,
        skip_model_load=True,
    )  # fmt: skip
    converted = time.perf_counter()
    if kind == "int8":
        op = cto.OpLinearQuantizerConfig(mode="linear_symmetric", dtype="int8")
        model = cto.linear_quantize_weights(model, cto.OptimizationConfig(global_config=op))
    else:
        # Without the small router, for which coremltools would need scikit-learn.
        op = cto.OpPalettizerConfig(mode=kind, nbits=4, granularity="per_grouped_channel",
                                    group_size=32, weight_threshold=2**17)  # fmt: skip
        model = cto.palettize_weights(model, cto.OptimizationConfig(global_config=op))
    model.save(str(target))
    return {"convert": converted - started, "compress": time.perf_counter() - converted}


def in_process(*arguments: str) -> Any:
    """This script again with other arguments; its last line is JSON."""
    command = [sys.executable, __file__, *arguments]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def verify(checkpoint: Path, recipe: str, target: Path, shards: list[str]) -> None:
    """Raises when a stamped package differs from one that was converted on its own."""
    opened = open_checkpoint(checkpoint)
    lowering = Lowering(Planner(opened, load_recipe(recipe)), opened)
    for shard in shards:
        lowering.verify(shard, Bundle(target).shard(shard))


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--skip-coremltools", action="store_true")
    parser.add_argument("--only-coremltools", help="one of its ways, as JSON; for this script")
    options = parser.parse_args()
    if options.only_coremltools:
        print(json.dumps(coremltools_layer(options.only_coremltools, WORK / "moe.mlpackage")))
        return
    if options.layers < 4:
        parser.error("--layers: at least 4, since the first two and the last are converted")
    checkpoint = Path(options.model)
    write_checkpoint(checkpoint, options.layers)
    result: dict[str, Any] = {}
    rows = []
    for recipe in options.recipes:
        path = str(Path(__file__).parent / f"{recipe}.toml")
        chosen = path if Path(path).exists() else recipe
        target = WORK / f"full-{recipe}"
        found = build(checkpoint, chosen, target)
        seconds = {n: s for n, s in found["shards"].items() if n.startswith("moe-")}
        # The first, the second and the last are the first of their kinds: those are converted.
        stamped = sorted(seconds)[2:-1]
        later = float(np.median([seconds[name] for name in stamped]))
        found |= {"moe_later": later, "moe_first": seconds["moe-01"]}
        found["moe_slowest_later"] = max(seconds[name] for name in stamped)
        package = Bundle(target).shard("moe-01")
        found["moe_megabytes"] = (
            sum(f.stat().st_size for f in package.rglob("*.*") if f.is_file()) / 1e6
        )
        if not options.skip_coremltools:
            theirs = in_process(str(checkpoint), "--only-coremltools", COREMLTOOLS[recipe])
            found |= {"coremltools": theirs, "ratio": sum(theirs.values()) / later}
            verify(checkpoint, chosen, target, ["moe-02", "attn-01"])
        shutil.rmtree(target)
        result[recipe] = found
        rows.append([recipe, found["moe_first"], later, found.get("ratio", "-"), found["gigabytes"],
                     found["moe_megabytes"], found["seconds"]])  # fmt: skip
        print(json.dumps({recipe: found}), file=sys.stderr)
    columns = ["recipe", "first MoE layer s", "later s", "x coremltools", "peak GB", "MoE MB",
               "whole build s"]  # fmt: skip
    report(f"ZAYA1-8B, {options.layers} layers", columns, rows, result, options.json)


if __name__ == "__main__":
    main()
