"""Gemma 4, lowered: whatever the layout, the contracts and the form of attention, one model."""

from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import InMemoryCheckpoint
from tests.families.gemma_models import FULL, SLIDING, build_gemma4, recipe
from tests.families.parity import tokens
from tests.lower.test_parity import HalfWeights, cosines, half_logits_of

from cetane.engine.authored import host_tables
from cetane.engine.engine import Engine
from cetane.engine.portable import ReferenceProgram
from cetane.lower.lower import Lowering
from cetane.mil import load
from cetane.plan import Planner

LENGTH = 44
"""Past the window of 32, and not a multiple of the width of a call."""
RECIPES: dict[str, dict[str, Any]] = {
    "shifting windows, four chunks": {
        "contract": "blend",
        "sliding": "shift",
        "layout": {"kind": "chunks", "cuts": [1, 2, 3], "head": "last"},
    },
    "merged": {"contract": "blend", "sliding": "shift", "layout": {"kind": "single"}},
    "a head that chooses": {
        "contract": "readonly",
        "layout": {"kind": "single"},
        "head": {"slices": 2, "choose": True},
    },
    "states": {"contract": "stateful", "layout": {"kind": "chunks", "cuts": [2]}},
    "lite": {
        "contract": "blend",
        "windowed": False,
        "layout": {"kind": "chunks", "cuts": [2], "head": "last"},
        "embedding": {"inside": True},
    },
    "a window as wide as the text, in blocks": {
        "contract": "readonly",
        "layout": {"kind": "single"},
        "family": {"full_window": 44, "sinks": 2, "full_block": 24},
    },
}


@cache
def checkpoint() -> HalfWeights:
    layer_types = [SLIDING, FULL, SLIDING, FULL]
    return HalfWeights(
        InMemoryCheckpoint(build_gemma4(num_hidden_layers=4, layer_types=layer_types))
    )


@cache
def expected() -> np.ndarray:
    layer_types = [SLIDING, FULL, SLIDING, FULL]
    model = build_gemma4(num_hidden_layers=4, layer_types=layer_types)
    return half_logits_of(model, tokens(288, LENGTH))


class Packages:
    """The exact executor on packages that are in no bundle."""

    name = "package"

    def __init__(self, folder: Path, precision: Any) -> None:
        self.folder, self.precision = folder, precision
        self.dtype = np.float32 if precision == "fp32" else np.float16

    def open(self, shard: str) -> ReferenceProgram:
        return ReferenceProgram(load(self.folder / f"{shard}.mlpackage"), self.precision)


@pytest.mark.parametrize("name", RECIPES)
def test_the_same_model(name: str, tmp_path: Path) -> None:
    wanted = recipe(tokens={"verify": 0, "prefill": 8}, context=96, **RECIPES[name])
    planner = Planner(checkpoint(), wanted)
    lowering = Lowering(planner, checkpoint())
    for shard in planner.members:
        lowering.lower(shard, tmp_path / f"{shard}.mlpackage")
    tables = host_tables(planner, checkpoint())
    ids, truth = tokens(288, LENGTH), expected()

    def logits(precision: str, pieces: list[int]) -> np.ndarray:
        engine = Engine(planner.plan(), Packages(tmp_path, precision), tables)
        session, cuts = engine.session(), np.cumsum([0, *pieces])
        return np.concatenate([session.feed(ids[a:b], "all") for a, b in pairwise(cuts)])

    for pieces in ([LENGTH], [LENGTH - 4, 1, 1, 1, 1]):
        found, half = logits("fp32", pieces), logits("fp16", pieces)
        assert (half.argmax(1) == truth.argmax(1)).all()
        if wanted.head.choose:
            assert np.abs(found.max(1) - truth.max(1)).max() < 1e-4
        else:
            assert np.abs(found - truth).max() < 1e-4
            assert cosines(half, truth).min() > 0.9999
