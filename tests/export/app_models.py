"""A small Gemma 4 for CoreML-LLM's runtime: its recipe, and its modules as an app's folder."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from tests.conftest import InMemoryCheckpoint
from tests.families.gemma_models import FULL, SLIDING, build_gemma4, recipe
from tests.lower.half_weights import HalfWeights

from cetane.export.coreml_llm import contract
from cetane.export.coreml_llm.app_folder import AppFolder, Arrays, shaped
from cetane.export.coreml_llm.planner import planners
from cetane.schema.recipe import Recipe

OF_E2B = contract.COMMITTED
"""The layers, by kind, into whose caches the real runtime writes accepted drafts, in each chunk."""
S, F = contract.SLIDING, contract.FULL
CONTEXT, WINDOW, DRAFTS, PREFILL, LENGTH = 64, 32, 3, 40, 52
"""Tokens: of the context, of the window, of a call that verifies, of a prefill, of the text."""
KINDS = [S, F, S, S, S, F, S, F]
MODEL: dict[str, Any] = {
    "num_hidden_layers": len(KINDS),
    "layer_types": [SLIDING if kind == S else FULL for kind in KINDS],
    "num_kv_shared_layers": 2,
}
"""The caches of layers 4 and 5 are read by 6 and 7."""
FIRST, SHARED = 3, 6
"""The layers at which the second chunk and the shared caches begin."""
FOUR = {"kind": "chunks", "cuts": [FIRST, SHARED, 7], "head": "last"}
THREE = {"kind": "chunks", "cuts": [FIRST, 7], "head": "last"}
MERGED = {"two": {"kind": "chunks", "cuts": [SHARED], "head": "last"}, "one": {"kind": "single"}}


@pytest.fixture(scope="module", autouse=True)
def committed() -> Iterator[None]:
    """A runtime that writes accepted drafts into this model's caches, as the real one into E2B's.
    Its first two packages have as many."""
    with pytest.MonkeyPatch.context() as patch:
        kinds = [{"sliding": 2, "full": 1}] * 2
        patch.setattr("cetane.export.coreml_llm.contract.COMMITTED", kinds)
        yield


def app_recipe(**options: Any) -> Recipe:
    """A recipe as that of the released app's folder; `options` replace tables of it."""
    return recipe(
        **{
            "contract": "blend",
            "sliding": "shift",
            "layout": FOUR,
            "tokens": {"verify": DRAFTS, "prefill": PREFILL},
            "head": {"slices": 2},
        }
        | options
    )


def authored_folder(
    options: dict[str, Any], owned: Sequence[int] = (FIRST, SHARED - FIRST)
) -> AppFolder:
    """The modules that would be traced, with the tables as they are, as a folder.

    `owned` are the layers with caches in the first chunks."""
    checkpoint = HalfWeights(InMemoryCheckpoint(build_gemma4(**MODEL)))
    found = planners(checkpoint, app_recipe(**options))
    modules = {}
    for planner in found:
        for shard, name in planner.names.items():
            for block in planner.members[shard]:
                block.load(checkpoint)
            for graph in planner.graphs(shard):
                modules[name, graph.function.name] = planner.module(graph)

    def call(package: str, function: str, inputs: Arrays) -> Arrays:
        module = modules[package, function]
        plan = module.function
        values = shaped({item.name: item.shape for item in plan.inputs}, inputs)
        with torch.no_grad():
            made = module(*(torch.from_numpy(value) for value in values.values()))
        for item, value in zip(plan.outputs, made, strict=True):
            assert tuple(value.shape) == item.shape, item.name
        return {o.name: v.numpy() for o, v in zip(plan.outputs, made, strict=True)}

    model = found[0].model
    tables = [
        t.read(checkpoint).numpy() for t in (model.embedding, model.tables["per_layer"].table)
    ]
    rotary = {}
    for kind, table in model.rotary.items():
        rotary[f"cos_{kind}"], rotary[f"sin_{kind}"] = table.cos_sin(CONTEXT).numpy()
    chunks = tuple(found[0].names.values())
    return AppFolder(
        call=call,
        chunks=chunks,
        embed=lambda token: tables[0][token],
        per_layer=lambda token: tables[1][token],
        rotary=rotary,
        context=CONTEXT,
        window=WINDOW,
        kinds=KINDS[:SHARED],
        owned=(*owned, *[0] * (len(chunks) - len(owned))),
        prefilled=FIRST,
        prefill_tokens=PREFILL,
        verify_tokens=DRAFTS if "verify" in found[0].modes.values() else 0,
    )
