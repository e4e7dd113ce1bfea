"""Shards of ZAYA1-8B as cetane lowers them, at the model's real size and without its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.gates.residency.graphs import add, blob, write

from cetane.families import author
from cetane.lower.convert import convert
from cetane.lower.patches import quiet
from cetane.lower.structure import functions_with_widest
from cetane.lower.tracing import labelled_weights
from cetane.mil.program import Program
from cetane.planner import Planner
from cetane.schema.recipe import load_recipe

ZAYA: dict[str, Any] = {
    "model_type": "zaya", "vocab_size": 262272, "hidden_size": 2048, "num_hidden_layers": 1,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128,
    "moe_intermediate_size": 2048, "num_experts": 16, "num_experts_per_tok": 1,
    "router_hidden_size": 256, "cca_time0": 2, "cca_time1": 2, "max_position_embeddings": 131072,
}  # fmt: skip


class ZeroCheckpoint:
    """A checkpoint of one layer that knows its shapes; every tensor is zero."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.source, self.config = "ZAYA1-8B", config
        model = author(config, "c1t", {}, self)
        hidden = (config["hidden_size"],)
        table = model.embedding
        self._shapes: dict[str, tuple[int, ...]] = {
            table.weight: (config["vocab_size"], *hidden), str(table.bias): hidden,
            str(table.scale): hidden, model.norm: hidden,
        }  # fmt: skip
        self._shapes |= {w.name: w.stored for b in model.layers for _, w in b.weights()}

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def names(self) -> list[str]:
        return sorted(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str) -> torch.Tensor:
        return torch.zeros(self._shapes[name], device="cpu")

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        return torch.zeros((stop - start, *self._shapes[name][1:]), device="cpu")


def lowered(recipe: str, shard: str, folder: Path) -> Program:
    """The decode function of a shard, as a recipe that comes with cetane lowers it."""
    planner = Planner(ZeroCheckpoint(ZAYA), load_recipe(recipe))
    graph, wide = next(
        (g, w) for g, w in functions_with_widest(planner, shard) if g.function.tokens == 1
    )
    with quiet():
        spec = convert(planner, shard, graph, wide).spec
    formats = {item.label: item.format.name for item in labelled_weights(planner, shard, graph)}
    for function in spec.mlProgram.functions.values():
        store_weights(function.block_specializations[function.opset], formats)
    return write(spec, folder)


def store_weights(block: Any, formats: dict[str, str]) -> None:
    """Make stored constants of the nameless weights, where coremltools casts them to fp16."""
    labels = {
        op.outputs[0].name: op.attributes["label"].immediateValue.tensor.strings.values[0]
        for op in block.operations
        if op.type == "constexpr_cetane_weight"
    }
    for op in block.operations:
        source = op.inputs["x"].arguments[0].name if op.type == "cast" else ""
        if source in labels:
            shape = [d.constant.size for d in op.outputs[0].type.tensorType.dimensions]
            op.inputs.clear()
            encode(op, formats[labels[source]], shape)
    for op in [op for op in block.operations if op.type == "constexpr_cetane_weight"]:
        block.operations.remove(op)


def encode(op: Any, form: str, shape: list[int]) -> None:
    """Make an op the constant of a format."""
    if form == "fp16":
        op.type = "const"
        op.attributes["val"].CopyFrom(blob("fp16", shape))
    elif form == "int8-per-channel":
        op.type = "constexpr_blockwise_shift_scale"
        add(op, "data", blob("int8", shape))
        add(op, "scale", blob("fp16", [shape[0], 1, 1, 1]))
    else:
        assert form.startswith("palette4") and form.endswith("group32")
        op.type = "constexpr_lut_to_dense"
        add(op, "indices", blob("uint4", shape))
        add(op, "lut", blob("fp16", [shape[0] // 32, 1, 1, 1, 16, 1]))
