"""The functions of the embedding: one hands out its table, the others look tokens up in it."""

import numpy as np
import torch
from torch import Tensor, nn

from cetane.bundle.rows import ROW_FORMATS
from cetane.export.coreai import contract
from cetane.families import StoredTable, Weights

ROWS = 1 << 14
"""The rows of a table that are read at a time."""


class LoadTable(nn.Module):
    """Gives the table, int8 or fp16 `(R, 1, C)`. R is V, or the next multiple of 8."""

    table: Tensor

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table)

    def forward(self) -> Tensor:
        return self.table


class Gather(nn.Module):
    """Looks up `(1, T)` tokens, fp16 `(1, T, 1, C)`. An int8 table has an fp16 step for each row.

    Apple's own exports have one step for the whole table; the host never sees it.
    """

    steps: Tensor

    def __init__(self, steps: Tensor | None) -> None:
        super().__init__()
        if steps is not None:
            self.register_buffer("steps", steps[:, None, None])
        self.quantized = steps is not None

    def forward(self, in_new_token_ids: Tensor, embedding_table: Tensor) -> Tensor:
        rows = embedding_table[in_new_token_ids]
        return rows.half() * self.steps[in_new_token_ids] if self.quantized else rows


def read_table(
    table: StoredTable, weights: Weights, rows: int, channels: int, quantized: bool
) -> tuple[Tensor, Tensor | None]:
    """The codes of the bundle: the table `(R, 1, C)`, and its rows' steps `(V,)` if it is int8.

    Rows of zeros fill the last group of rows; no token has them.
    """
    kind = torch.int8 if quantized else torch.float16
    filled = -(-rows // contract.ROW_INTERLEAVE) * contract.ROW_INTERLEAVE
    whole = torch.zeros((filled, 1, channels), dtype=kind)
    steps = torch.empty(rows, dtype=torch.float16) if quantized else None
    for start in range(0, rows, ROWS):
        stop = min(start + ROWS, rows)
        read = table.read(weights, start, stop)
        if steps is None:
            whole[start:stop, 0] = read
        else:
            made = ROW_FORMATS["int8"].encode(read.numpy())
            whole[start:stop, 0] = torch.from_numpy(made["values"])
            halves = (made["scales"] / np.float32(127)).astype(np.float16)
            steps[start:stop] = torch.from_numpy(halves)
    return whole, steps
