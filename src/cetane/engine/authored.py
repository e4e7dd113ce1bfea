"""A backend on the families' torch modules in fp32: it runs the port before it is lowered."""

from typing import Any

import numpy as np
import torch

from cetane.bundle.tables import Tables
from cetane.engine.backend import Array, Arrays
from cetane.engine.engine import Engine
from cetane.families import Shard, TokenTable, Weights
from cetane.mil.executor import TensorState
from cetane.planner import Planner


class AuthoredProgram:
    """A shard as torch modules, one for each function, by its name."""

    def __init__(self, modules: dict[str, Shard]) -> None:
        self.modules = modules

    def make_state(self, function: str) -> TensorState:
        buffers = self.modules[function].named_buffers()
        return TensorState({name: torch.zeros_like(buffer) for name, buffer in buffers})

    @torch.inference_mode()
    def call(self, function: str, inputs: Arrays, state: TensorState) -> Arrays:
        module = self.modules[function]
        for name, _ in module.named_buffers():
            setattr(module, name, state.tensors[name])
        results = module(*(torch.from_numpy(inputs[item.name]) for item in module.inputs))
        return {
            item.name: np.array(result)  # a copy: later calls write into states
            for item, result in zip(module.outputs, results, strict=True)
        }


class AuthoredBackend:
    """The families' modules with their weights, one module per function."""

    name, by_rows = "authored", False
    dtype: type[np.floating[Any]] = np.float32

    def __init__(self, planner: Planner, weights: Weights) -> None:
        self.planner, self.weights = planner, weights

    def open(self, shard: str) -> AuthoredProgram:
        for block in self.planner.members[shard]:
            block.load(self.weights)
        graphs = self.planner.graphs(shard)
        return AuthoredProgram({g.function.name: self.planner.module(g) for g in graphs})


def authored_engine(planner: Planner, weights: Weights) -> Engine:
    """An engine on the authored modules of a plan."""
    return Engine(planner.plan(), AuthoredBackend(planner, weights), host_tables(planner, weights))


class StoredRows:
    """A table `(V, C)`. Each access reads its rows from the checkpoint, as fp32 `(n, C)`."""

    def __init__(self, table: TokenTable, weights: Weights) -> None:
        self.table, self.weights = table, weights

    @property
    def shape(self) -> tuple[int, int]:
        return self.table.rows, self.table.channels

    def __getitem__(self, tokens: "Array | slice") -> Array:
        if isinstance(tokens, slice):
            start, stop, _ = tokens.indices(self.table.rows)
            return np.asarray(self.table.table.read(self.weights, start, stop))
        distinct, where = np.unique(tokens, return_inverse=True)
        rows = [self.table.table.read(self.weights, int(t), int(t) + 1) for t in distinct]
        together: Array = torch.cat(rows).numpy()[where]
        return together


def embedding_rows(planner: Planner, weights: Weights) -> StoredRows:
    """The embedding of the checkpoint, for a bundle whose folder has no embedding table."""
    model = planner.model
    return StoredRows(TokenTable(model.vocab, model.hidden, model.embedding), weights)


IN_MEMORY = 1 << 26
"""The largest embedding that is kept in memory, in bytes of fp32. Gates read only a few
hundred rows of a larger one."""


def host_tables(planner: Planner, weights: Weights) -> Tables:
    """The host's tables without files: a small embedding in memory, others read row by row."""
    model = planner.model
    context = planner.recipe.cache.context
    small = 4 * model.vocab * model.hidden <= IN_MEMORY
    # Many quantised layouts decode the whole tensor to give one row.
    whole = small or getattr(weights, "quantization", None) is not None
    return Tables(
        model.embedding.read(weights).numpy() if whole else embedding_rows(planner, weights),
        {name: table.cos_sin(context).numpy() for name, table in model.rotary.items()},
        {name: StoredRows(table, weights) for name, table in model.tables.items()},
    )
