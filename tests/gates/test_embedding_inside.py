"""A bundle whose first shard holds the embedding has no table of it, and needs none."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.conftest import tiny_recipe
from tests.converting import converted_once

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint, open_checkpoint
from cetane.engine.authored import StoredRows, embedding_rows
from cetane.errors import CetaneError
from cetane.gates.diff import compare_bundles
from cetane.gates.golden import golden
from cetane.gates.port import packaged
from cetane.gates.weights import wrong_weights
from cetane.mil import load
from cetane.mil.program import NamedValue, Op, StoredConstant, TensorType
from cetane.pipeline.build import build
from cetane.planner import Planner

from .conftest import with_ops


@pytest.fixture(scope="module")
def bundle(tiny_checkpoint_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    wanted = tiny_recipe(
        verify=None, layout={"kind": "single"}, embedding={"inside": True, "format": "int8"}
    )
    target = tmp_path_factory.mktemp("inside") / "bundle"
    with converted_once():
        return build(open_checkpoint(tiny_checkpoint_folder), wanted, target, lambda *_: None)


def test_there_is_no_table(bundle: Bundle) -> None:
    bundle.verify()
    assert not [name for name in bundle.manifest.files if name.startswith("embedding")]
    assert (bundle.plan.tables, bundle.plan.embedding_bytes) == ({}, 0)
    tables = bundle.tables()
    assert tables.tokens is None
    with pytest.raises(CetaneError, match="no table of the embedding: its first shard holds it"):
        _ = tables.embedding  # as a draft head would


def test_gates_take_it_from_the_checkpoint(bundle: Bundle, checkpoint: Checkpoint) -> None:
    assert golden(bundle, checkpoint, lambda *_: None, prompts=0).passed
    rows = embedding_rows(Planner(checkpoint, bundle.plan.recipe), checkpoint)
    assert isinstance(rows, StoredRows)
    table = checkpoint.read("model.embed_tokens.weight").numpy()
    assert rows.shape == table.shape
    for part in (slice(0, 7), slice(280, 300), np.array([5, 5, 287])):
        np.testing.assert_array_equal(rows[part], table[part])


def test_two_of_them_are_compared(bundle: Bundle) -> None:
    comparisons, tables = compare_bundles(bundle, bundle, "decode", "fp32", lambda *_: None)
    assert comparisons
    assert set(tables) == {"rotary default"}


def test_a_table_that_a_function_reads_must_be_there(
    tiny_bundle: Callable[..., Bundle],
) -> None:
    """A manifest may have been changed."""
    plan = tiny_bundle(contract="stateful", layout={"kind": "single"}, tensor_layout="ct1",
                       head={"slices": 2}).plan  # fmt: skip
    content = json.loads(plan.model_dump_json())
    del content["tables"]["tokens"]
    with pytest.raises(ValueError, match="no table tokens"):
        type(plan).model_validate(content)


def test_a_copy_of_the_embedding(
    bundle: Bundle, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function looks rows up in a constant beside the embedding's. One row of it is wrong, of a
    token that no probe has."""
    port = packaged(bundle, Planner(checkpoint, bundle.plan.recipe), checkpoint)
    assert not [*wrong_weights(port, checkpoint)]
    rows = checkpoint.read("model.embed_tokens.weight").numpy().astype(np.float16)
    rows[200] = 0
    type_ = TensorType(rows.shape, "fp16")
    copy = Op("const", "copy", {"val": (StoredConstant(type_, lambda: rows),)},
              (NamedValue("copy", type_),))  # fmt: skip

    def changed(op: Op) -> list[Op]:
        if op.kind != "gather":
            return [op]
        return [copy, replace(op, inputs=op.inputs | {"x": ("copy",)})]

    monkeypatch.setattr("cetane.gates.port.load", lambda path: with_ops(load(path), changed))
    found = [*wrong_weights(port, checkpoint)]
    assert {one.parameter for one in found} == {"model.embed_tokens.weight"}
    assert {one.problem for one in found} == {
        "the function decode does not read it", "the function prefill does not read it",
    }  # fmt: skip
