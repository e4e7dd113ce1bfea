"""The folder that CoreML-LLM's Swift runtime loads for Gemma 4 (commit 72178c6).

Its packages have other inputs and outputs than ours: channels last, caches 512 wide, the token
chosen inside. So a shard is lowered once more, from the same checkpoint by the same recipe, inside
an adapter. Sources of the contract: `ChunkedEngine.swift`, `ModelConfig.swift` and
`EmbeddingLookup.swift` of that repository.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from cetane.build import Progress
from cetane.bundle import Bundle, quantize_rows, replacing, write_json
from cetane.checkpoint import Checkpoint
from cetane.errors import CetaneError
from cetane.families import parse_config
from cetane.families.base import CacheGroup, Head
from cetane.families.flow import Input, Output, ToTensor
from cetane.families.shard import Shard
from cetane.lower.lower import Lowering
from cetane.mil import load
from cetane.plan import Function, Graph, Planner

FILES = {
    4: ("chunk1", "chunk2", "chunk3", "chunk4"),
    3: ("chunk1", "chunk2_3way", "chunk3_3way"),
}
"""Names of the packages by how many there are."""
WIDTH = 512
"""Of keys and values in caches, whatever the heads' own."""
NAMES = {
    "hidden": "hidden_states",
    "mask_full": "causal_mask_full",
    "mask_sliding": "causal_mask_sliding",
    "full_write": "update_mask",
    "cos_sliding": "cos_s",
    "sin_sliding": "sin_s",
    "cos_full": "cos_f",
    "sin_full": "sin_f",
    "per_layer_tokens": "per_layer_raw",
    "per_layer": "per_layer_combined",
    "shared_sliding_k": "kv13_k",
    "shared_sliding_v": "kv13_v",
    "shared_full_k": "kv14_k",
    "shared_full_v": "kv14_v",
    **{f"{g}_{p}": f"{p.upper()}_{g}_in" for g in ("sliding", "full") for p in "kv"},
}
"""Our name of an input -> theirs."""
COMPILE = "for p in *.mlpackage; do xcrun coremlcompiler compile $p . && rm -r $p; done"
"""What a Mac runs in the folder: phones load compiled packages only."""
ROWS = 1 << 12
"""Of an embedding, in memory at a time."""


def theirs(name: str) -> str:
    """Their name of one of our inputs or outputs."""
    if not name.endswith("_out"):
        return NAMES[name]
    inner = NAMES[name.removesuffix("_out")]
    if inner.startswith("kv1"):  # handed on under one name
        return inner
    return f"{inner.removesuffix('_in')}_out"


def is_cache(name: str) -> bool:
    return name.startswith(("K_", "V_"))


def their_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Channels, or slots that are written, come last; caches are of one width."""
    if name == "hidden_states" or name.startswith(("hidden", "per_layer")):
        return (1, 1, shape[1])
    if name.startswith("causal_mask"):
        return shape
    *outer, width, slots = shape
    return (*outer, slots, WIDTH if is_cache(name) else width)


class Adapter(nn.Module):
    """A shard of ours behind their inputs and outputs."""

    def __init__(self, shard: Shard, function: Function, head: Head | None) -> None:
        super().__init__()
        self.shard, self.function, self.head = (shard,), function, head
        self.inputs = function.inputs

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        (shard,) = self.shard
        given = [
            ours(item.name, tensor, inner.shape)
            for item, tensor, inner in zip(self.inputs, tensors, shard.inputs, strict=True)
        ]
        made = dict(zip((o.name for o in shard.outputs), shard(*given), strict=True))
        results = {
            theirs(name): outward(theirs(name), value)
            for name, value in made.items()
            if not name.startswith("logits")
        }
        if self.head is not None:
            pieces = [value for name, value in made.items() if name.startswith("logits")]
            logits = torch.cat(pieces, 1).flatten(1)
            largest = logits.amax(1)
            cap = self.head.model[0].softcap
            results["token_id"] = logits.argmax(1).to(torch.int32)
            results["token_logit"] = largest if cap is None else torch.tanh(largest / cap) * cap
            results["hidden_states_out"] = self.head.norm(made["hidden_out"]).reshape(1, 1, -1)
        return tuple(results[output.name] for output in self.function.outputs)


def ours(name: str, value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """An input of theirs as one of ours."""
    if name.startswith("causal_mask"):
        return value
    if len(value.shape) == 3:
        return value.reshape(shape)
    return value[..., : shape[2]].transpose(2, 3)


def outward(name: str, value: Tensor) -> Tensor:
    """An output of ours as one of theirs."""
    if name.startswith(("hidden", "per_layer")):
        return value.reshape(1, 1, -1)
    value = value.transpose(2, 3)
    return nn.functional.pad(value, (0, WIDTH - value.shape[3])) if is_cache(name) else value


class ContractPlanner(Planner):
    """Plans the decode function of every shard as their runtime calls it."""

    def inner(self, shard: str) -> Graph:
        """Our own function; a head's shard gives its hidden state too."""
        found = next(g for g in super().graphs(shard) if g.function.name == "decode")
        outputs = found.function.outputs
        if self.head(shard) is None:
            return found
        hidden = Output(
            name="hidden_out", shape=self._shape("hidden", 1), sink=ToTensor(name="hidden")
        )
        return replace(
            found, function=found.function.model_copy(update={"outputs": (*outputs, hidden)})
        )

    def model_heads(self, group: str) -> CacheGroup:
        kept = self.model.memory[group]
        assert isinstance(kept, CacheGroup)
        return kept

    def head(self, shard: str) -> Head | None:
        return next((b for b in self.members[shard] if isinstance(b, Head)), None)

    def graphs(self, shard: str) -> list[Graph]:
        inner = self.inner(shard)
        inputs = tuple(renamed(item) for item in inner.function.inputs)
        outputs = [
            renamed(item) for item in inner.function.outputs if not item.name.startswith("logits")
        ]
        if self.head(shard) is not None:
            sink = ToTensor(name="token")
            outputs += [
                Output(name="token_id", shape=(1,), dtype="int32", sink=sink),
                Output(name="token_logit", shape=(1,), sink=sink),
            ]
        function = inner.function.model_copy(
            update={"name": "main", "inputs": inputs, "outputs": tuple(outputs)}
        )
        return [replace(inner, function=function)]

    def module(self, graph: Graph) -> Any:
        shard = graph.function.owner
        return Adapter(super().module(self.inner(shard)), graph.function, self.head(shard))


Port = TypeVar("Port", Input, Output)


def renamed(item: Port) -> Port:
    """A port of ours under their name, in their shape."""
    name = theirs(item.name)
    return item.model_copy(update={"name": name, "shape": their_shape(name, item.shape)})


def export(bundle: Bundle, checkpoint: Checkpoint, target: Path, progress: Progress) -> None:
    """Write the folder; `target` must not exist. Raises CetaneError for a bundle that is not of
    Gemma 4, or whose layout or contracts their runtime does not know."""
    made = bundle.plan.recipe  # whose head may choose by itself; here the adapter does
    recipe = made.model_copy(update={"head": made.head.model_copy(update={"choose": False})})
    planner = ContractPlanner(checkpoint, recipe)
    names = packages(planner)
    if target.exists():
        raise CetaneError(f"{target} exists", "choose another name")
    with replacing(target) as folder:
        folder.mkdir(parents=True)
        lowering = Lowering(planner, checkpoint)
        parts: dict[str, Callable[[], None]] = {
            f"{name}.mlpackage": partial(lowering.lower, shard, folder / f"{name}.mlpackage")
            for shard, name in names.items()
        }
        parts["embeddings"] = partial(write_embeddings, planner, checkpoint, folder)
        parts["rotary tables"] = partial(write_rotary, planner, folder)
        parts["config"] = partial(write_config, planner, checkpoint, folder)
        for done, (name, make) in enumerate(parts.items()):
            progress(name, done, len(parts))
            make()
        progress("done", len(parts), len(parts))


def packages(planner: Planner) -> dict[str, str]:
    """Their names of our shards."""
    recipe = planner.recipe
    if planner.checkpoint.config["model_type"] != "gemma4_text" or not planner.model.tables:
        raise CetaneError("the layout coreml-llm is for Gemma 4 with per-layer embeddings")
    if len(planner.members) not in FILES or recipe.layout.head != "last":
        raise CetaneError(
            f"their runtime loads 3 or 4 packages, not {len(planner.members)}",
            "port with the recipe gemma4-4chunk or gemma4-3chunk",
        )
    for name, contract in (("full", "blend"), ("sliding", "shift")):
        if planner.slots[name].contract != contract or recipe.tensor_layout != "c1t":
            raise CetaneError(
                f"their {name} layers have {contract} caches, this bundle's "
                f"{planner.slots[name].contract}",
                "port with the recipe gemma4-4chunk or gemma4-3chunk",
            )
    if not planner.slots["sliding"].limited or planner.slots["full"].limited:
        raise CetaneError("their sliding layers keep a window, their full layers the context")
    if recipe.head.subset is not None:
        raise CetaneError("their runtime takes a choice of the head for a token: no head.subset")
    if recipe.embedding.inside or any(
        g.dim > WIDTH for g in planner.model.memory.values() if isinstance(g, CacheGroup)
    ):
        raise CetaneError(f"their runtime looks tokens up itself, and has heads of {WIDTH} at most")
    return dict(zip(planner.members, FILES[len(planner.members)], strict=True))


def write_embeddings(planner: Planner, checkpoint: Checkpoint, folder: Path) -> None:
    """int8 rows and their fp16 scales; the factors are in the config."""
    tables = {
        "embed_tokens": planner.model.embedding,
        "embed_tokens_per_layer": planner.model.tables["per_layer"].table,
    }
    for name, table in tables.items():
        plain = replace(table, factor=1.0)
        rows = checkpoint.shape(table.weight)[0]
        values, scales = folder / f"{name}_q8.bin", folder / f"{name}_scales.bin"
        with values.open("wb") as to_values, scales.open("wb") as to_scales:
            for start in range(0, rows, ROWS):
                found = plain.read(checkpoint, start, min(start + ROWS, rows)).numpy()
                quantized, scale = quantize_rows(found)
                to_values.write(quantized.tobytes())
                to_scales.write(scale.tobytes())
    for name, weight in (
        ("per_layer_projection", "model.per_layer_model_projection.weight"),
        ("per_layer_norm_weight", "model.per_layer_projection_norm.weight"),
    ):
        half = checkpoint.read(weight).to(torch.float16).numpy()
        (folder / f"{name}.bin").write_bytes(half.tobytes())


def positions(context: int) -> int:
    """How many rows a rotary table has."""
    return max(2 * context, 4096)


def write_rotary(planner: Planner, folder: Path) -> None:
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
            "model_name": Path(checkpoint.source).name,
            "architecture": "gemma4",
            "hidden_size": config.hidden_size,
            "context_length": planner.recipe.cache.context,
            "vocab_size": config.vocab_size,
            "bos_token_id": tokenizer.bos_id,
            "eos_token_id": min(tokenizer.eos_ids, default=None),
            "per_layer_dim": width,
            "num_layers": config.num_hidden_layers,
            "num_hidden_layers": config.num_hidden_layers,
            "sliding_window": config.sliding_window,
            "embed_scale": config.hidden_size**0.5,
            "per_layer_model_projection_scale": config.hidden_size**-0.5,
            "per_layer_input_scale": 2**-0.5,
            "per_layer_embed_scale": width**0.5,
            "layer_types": config.layer_types,
            "num_kv_shared_layers": config.num_kv_shared_layers,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": planner.model_heads("sliding").heads,
            "head_dim": planner.model_heads("sliding").dim,
            "global_head_dim": planner.model_heads("full").dim,
            "rms_norm_eps": config.rms_norm_eps,
            "final_logit_softcapping": config.final_logit_softcapping,
            "quantization": planner.recipe.compression.default,
            "compute_units": "CPU_AND_NE",
        },
    )
    (folder / "hf_model").mkdir()
    tokenizer.save(folder / "hf_model")
    write_json(folder / "hf_model" / "config.json", checkpoint.config)


def check(folder: Path) -> list[str]:
    """What in a folder their runtime would stumble over; nothing, if it is right."""
    try:
        config = json.loads((folder / "model_config.json").read_text())
        sizes = {key: config[key] for key in CONFIG_KEYS}
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"model_config.json: {error!r}"]
    problems = [
        f"model_config.json: {key} = {value!r}"
        for key, value in sizes.items()
        if type(value) is not int or value < 1
    ]
    if problems:
        return problems
    context, vocab, hidden = (sizes[k] for k in ("context_length", "vocab_size", "hidden_size"))
    width = sizes["num_layers"] * sizes["per_layer_dim"]
    files = {
        "embed_tokens_q8.bin": vocab * hidden,
        "embed_tokens_scales.bin": 2 * vocab,
        "embed_tokens_per_layer_q8.bin": vocab * width,
        "embed_tokens_per_layer_scales.bin": 2 * vocab,
        "per_layer_projection.bin": 2 * width * hidden,
        "per_layer_norm_weight.bin": 2 * sizes["per_layer_dim"],
        "hf_model/tokenizer.json": None,
        "hf_model/config.json": None,
    }
    for name, size in files.items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif size is not None and path.stat().st_size != size:
            problems.append(f"{name} has {path.stat().st_size} bytes, not {size}")
    for name, dim in (("sliding", "head_dim"), ("full", "global_head_dim")):
        for part in ("cos", "sin"):
            problems += check_rotary(folder / f"{part}_{name}.npy", context, sizes[dim])
    return problems + check_packages(folder, sizes)


CONFIG_KEYS = (
    "context_length", "vocab_size", "hidden_size", "num_layers", "per_layer_dim", "sliding_window",
    "head_dim", "global_head_dim",
)  # fmt: skip


def check_rotary(path: Path, context: int, dim: int) -> list[str]:
    """Rows for every position that the runtime may ask for, in fp16, header of version 1."""
    try:
        with path.open("rb") as file:
            version = np.lib.format.read_magic(file)
        table = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        return [f"{path.name}: {error}"]
    if version != (1, 0) or table.dtype != np.float16 or table.shape != (positions(context), dim):
        return [f"{path.name}: version {version}, {table.dtype} of {table.shape}"]
    return []


def check_packages(folder: Path, sizes: dict[str, int]) -> list[str]:
    """Every package is there and takes what the runtime gives, masks as long as the context."""
    found = [names for names in FILES.values() if (folder / f"{names[-1]}.mlpackage").is_dir()]
    if not found:
        return ["no chunk4.mlpackage and no chunk3_3way.mlpackage"]
    problems: list[str] = []
    context, window = sizes["context_length"], sizes["sliding_window"]
    wanted = {
        "hidden_states": (1, 1, sizes["hidden_size"]),
        "causal_mask_full": (1, 1, 1, context),
        "causal_mask_sliding": (1, 1, 1, window),
        "update_mask": (1, 1, context, 1),
        "cos_s": (1, 1, 1, sizes["head_dim"]),
        "sin_s": (1, 1, 1, sizes["head_dim"]),
        "cos_f": (1, 1, 1, sizes["global_head_dim"]),
        "sin_f": (1, 1, 1, sizes["global_head_dim"]),
        "per_layer_raw": (1, 1, sizes["num_layers"] * sizes["per_layer_dim"]),
        "per_layer_combined": (1, 1, sizes["num_layers"] * sizes["per_layer_dim"]),
    }
    handed: set[str] = set()
    for name in found[0]:
        try:
            (function,) = load(folder / f"{name}.mlpackage").functions.values()
        except (CetaneError, ValueError) as error:
            problems.append(f"{name}: {error}")
            continue
        for port, kind in function.inputs.items():
            shape = tuple(kind.shape)
            slots = context if "full" in port else window
            if port in wanted:
                right = shape == wanted[port]
            elif port.startswith(("K_", "V_")):
                right = shape[1:] == (1, slots, WIDTH) and f"{port[:-3]}_out" in function.outputs
            else:
                right = port in handed
            if not right:
                problems.append(f"{name}: {port} of shape {shape}")
        if name != found[0][-1] and "causal_mask_full" not in function.inputs:
            problems.append(f"{name}: no causal_mask_full")
        handed |= set(function.outputs)
    if not {"token_id", "token_logit", "hidden_states_out"} <= handed:
        problems.append(f"{found[0][-1]} chooses no token")
    return problems
