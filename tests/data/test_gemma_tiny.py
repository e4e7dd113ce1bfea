"""The trained Gemma 4 that ships as data: small, right in both implementations, and far-sighted."""

import numpy as np
import pytest
import torch
import transformers

from cetane.checkpoint import Checkpoint, open_checkpoint
from cetane.engine.authored import authored_engine
from cetane.lab.models import gemma_tiny
from cetane.planner import Planner
from cetane.schema.recipe import parse_recipe

WINDOW = 64
PASSAGE, GAP = 48, 100
"""Tokens of a passage that comes again, and between both."""


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint(gemma_tiny())


@pytest.fixture(scope="module")
def again(checkpoint: Checkpoint) -> list[int]:
    """Random tokens; the first passage of them comes again at the end."""
    ids: list[int] = np.random.default_rng(3).integers(300, 2048, PASSAGE + GAP).tolist()
    return ids + ids[:PASSAGE]


def losses(logits: torch.Tensor, ids: list[int]) -> torch.Tensor:
    """Nats of the second passage's tokens, but for its first four, which nothing can know."""
    every = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="none")
    return every[-PASSAGE + 3 :]


def port(checkpoint: Checkpoint, ids: list[int], **family: int) -> torch.Tensor:
    content = {"name": "tiny", "cache": {"context": 256}, "family": family}
    planner = Planner(checkpoint, parse_recipe(content, "tiny"))
    logits = authored_engine(planner, checkpoint).session().feed(ids, "all")
    assert logits is not None
    return torch.from_numpy(logits)


def test_is_small() -> None:
    assert sum(path.stat().st_size for path in gemma_tiny().iterdir()) <= 8_000_000


def test_full_layers_matter(checkpoint: Checkpoint, again: list[int]) -> None:
    """The port is transformers' model. Windows in its full layers cost it what lies beyond."""
    model = transformers.AutoModelForCausalLM.from_pretrained(gemma_tiny(), dtype=torch.float32)
    with torch.inference_mode():
        theirs = model(torch.tensor([again]), use_cache=False).logits[0]
    ours = port(checkpoint, again)
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=0)
    blind = port(checkpoint, again, full_window=WINDOW)
    assert losses(blind, again).mean() > losses(ours, again).mean() + 1
