"""Rows of a host's table are what their format makes of them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.torch import load_file
from tests.conftest import InMemoryCheckpoint
from tests.families import gemma_models

from cetane.bundle import Bundle
from cetane.bundle.rows import BLOCK, ROW_FORMATS, EncodedRows
from cetane.errors import CetaneError
from cetane.lower.lower import Lowering
from cetane.pipeline.parts import parts
from cetane.planner import Planner
from cetane.schema.function import TablePlan
from cetane.schema.recipe import RowFormatName


@st.composite
def tables(draw: st.DrawFn) -> np.ndarray:
    """Rows of many magnitudes, some of zeros; the last block may be shorter."""
    shape = (draw(st.integers(1, 5)), draw(st.sampled_from([2, 30, 32, 70, 96])))
    rows = draw(hnp.arrays(np.float32, shape, elements=st.floats(-1000, 1000, width=32)))
    rows[:, :BLOCK] *= draw(st.sampled_from([0.0, 1e-9, 1e-3, 1.0]))
    return rows


@pytest.mark.parametrize("name", ROW_FORMATS)
@settings(max_examples=50)
@given(rows=tables())
def test_parts_have_the_types_and_shapes_that_are_promised(
    name: RowFormatName, rows: np.ndarray
) -> None:
    row_format, table = ROW_FORMATS[name], TablePlan(rows=len(rows), channels=rows.shape[1])
    made = row_format.encode(rows)
    found = {part: (array.dtype.str, array.shape) for part, array in made.items()}
    assert found == row_format.stored(table)
    assert row_format.nbytes(table) == sum(array.nbytes for array in made.values())
    stored = EncodedRows(row_format, made, rows.shape)
    whole = stored[np.arange(len(rows))]
    assert whole.shape == rows.shape
    assert np.array_equal(stored[0], whole[0])
    assert np.array_equal(stored[:1], whole[:1])


@settings(max_examples=50)
@given(rows=tables())
def test_int8(rows: np.ndarray) -> None:
    """Every value within half a step, and what rounding the scale to fp16 costs; zeros stay."""
    made = ROW_FORMATS["int8"].encode(rows)
    limit = np.abs(rows).max(axis=1, keepdims=True) * (0.5 / 127 + 2**-10) + 1e-6
    assert (np.abs(ROW_FORMATS["int8"].decode(made) - rows) <= limit).all()


@settings(max_examples=50)
@given(rows=tables())
def test_int4(rows: np.ndarray) -> None:
    """The same, where 32 columns share a scale."""
    made = ROW_FORMATS["int4"].encode(rows)
    limit = np.empty_like(rows)
    for start in range(0, rows.shape[1], BLOCK):
        block = slice(start, start + BLOCK)
        limit[:, block] = np.abs(rows[:, block]).max(axis=1, keepdims=True)
    limit = limit * (0.5 / 7 + 2**-10) + 1e-6
    assert (np.abs(ROW_FORMATS["int4"].decode(made) - rows) <= limit).all()
    assert not np.isin(made["values"] & 15, 8).any()  # no -8
    assert not np.isin(made["values"] >> 4, 8).any()


def test_two_columns_are_a_byte() -> None:
    """The first in its low bits, in two's complement."""
    rows = np.zeros((2, 64), np.float32)
    rows[1, 32:36] = [3.5, -0.5, -3.0, 1.2]  # a scale of a half: 7, -1, -6, 2
    made = ROW_FORMATS["int4"].encode(rows)
    assert made["scales"].tolist() == [[0, 0], [0, 0.5]]
    assert made["values"][1, 16:18].tolist() == [0xF7, 0x2A]
    assert np.count_nonzero(made["values"]) == 2
    decoded = ROW_FORMATS["int4"].decode(made)
    assert decoded[1, 32:36].tolist() == [3.5, -0.5, -3.0, 1.0]
    assert np.count_nonzero(decoded) == 4


def test_an_odd_number_of_columns() -> None:
    with pytest.raises(CetaneError, match="two columns in a byte, but a table has 81") as refused:
        ROW_FORMATS["int4"].nbytes(TablePlan(rows=5, channels=81))
    assert refused.value.hint == "--set embedding.format=int8"


def test_a_bundle_of_int4_rows(
    tiny_bundle: Callable[..., Bundle], tiny_checkpoint_folder: Path
) -> None:
    """Its files say what numpy makes of the checkpoint's own rows."""
    made = tiny_bundle(embedding={"format": "int4"}, verify=None, prefill=None)
    weights = load_file(tiny_checkpoint_folder / "model.safetensors")["model.embed_tokens.weight"]
    blocks = weights.float().numpy().reshape(288, 2, 32)
    steps = (np.abs(blocks).max(-1, keepdims=True) / 7).astype(np.float16).astype(np.float32)
    truth = np.rint(blocks / steps).clip(-7, 7) * steps
    rows = made.tables().embedding
    assert rows.shape == (288, 64)
    np.testing.assert_array_equal(rows[np.array([3, 7])], truth.reshape(288, 64)[[3, 7]])
    sizes = {name: file.stat().st_size for name in ("embedding.npy", "embedding-scales.npy")
             if (file := made.file(name))}  # fmt: skip
    assert sizes == {"embedding.npy": 128 + 288 * 32, "embedding-scales.npy": 128 + 288 * 2 * 2}
    assert made.plan.embedding_bytes == 288 * (32 + 4)


def test_every_table_of_a_gemma(tmp_path: Path) -> None:
    """Rows by layer too; theirs have 48 columns, so the last block is shorter."""
    model = gemma_models.build_gemma4()
    checkpoint = InMemoryCheckpoint(model)
    planner = Planner(checkpoint, gemma_models.recipe(embedding={"format": "int4"}))
    made = parts(planner, checkpoint, Lowering(planner, checkpoint))
    weights = {"embedding": model.model.embed_tokens, "embedding-per_layer":
               model.model.embed_tokens_per_layer}  # fmt: skip
    for name, module in weights.items():
        for part in ("", "-scales"):
            made[f"{name}{part}.npy"](tmp_path / f"{name}{part}.npy")
        values, scales = (np.load(tmp_path / f"{name}{part}.npy") for part in ("", "-scales"))
        truth = module(torch.arange(288)).detach().numpy()  # with the factor of its rows
        assert scales.shape == (288, 2)
        for column in (0, 1, 31, 32, truth.shape[1] - 1):
            bits = values[:, column // 2] >> 4 * (column % 2) & 15
            integers = np.where(bits > 7, bits.astype(int) - 16, bits)
            step = scales[:, column // 32].astype(np.float32)
            assert (np.abs(integers * step - truth[:, column]) <= 0.51 * step).all()
