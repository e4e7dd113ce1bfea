"""Hidden states that draft heads read of an engine are those of transformers' model."""

from typing import Any

import pytest
import torch
from tests.families.matrix_models import (
    build_falcon,
    build_hybrid,
    build_nemotron,
    build_olmo_hybrid,
)
from tests.families.mixture_models import build_afmoe
from tests.families.parity import engine_of, tokens
from tests.families.recipes import recipe

from cetane.speculate.draft_heads.features import Taps, tapped_blocks, tapped_shards
from cetane.speculate.draft_heads.windows import windows_of_model

MODELS: dict[str, Any] = {
    "granitemoehybrid": lambda: build_hybrid("dense"),
    "granitemoehybrid, experts": lambda: build_hybrid("mixture"),
    "falcon_h1": build_falcon,
    "nemotron_h": lambda: build_nemotron("mixture"),
    "olmo_hybrid": build_olmo_hybrid,
    "afmoe, which norms the sum of experts": build_afmoe,
}


@pytest.mark.parametrize("name", MODELS)
def test_layers_of_several_kinds(name: str) -> None:
    """Beside drafts that are refused: a draft head must not see their states."""
    model = MODELS[name]()
    engine = engine_of(model, recipe("readonly", "per-layer"))
    shards, ids = tapped_shards(engine.plan), tokens(engine.plan.vocab)
    layers = [int(block.rpartition("-")[2]) for block in tapped_blocks(engine.plan)]
    taps = Taps(engine.plan, shards)
    session = engine.session(watch=[taps.see], whole=True)
    found = []
    for start in range(0, len(ids), 4):
        session.evaluate([*ids[start : start + 2], 7, 8])
        session.accept(2)
        found.append(taps.take(session.position, session.path))
        session.feed(ids[start + 2 : start + 4], "all")
        found.append(taps.take(session.position, session.path))
    own = torch.cat([torch.as_tensor(part) for part in found])
    wanted = windows_of_model(model, layers, torch.tensor([ids])).features[0].float()
    torch.testing.assert_close(own.float(), wanted, rtol=2e-3, atol=2e-3)
