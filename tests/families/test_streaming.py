"""Key/value heads that keep the first tokens and the newest: against transformers with a mask for
each head, in every layer its own."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import InMemoryCheckpoint, build_model
from tests.families.alibi_models import build_alibi
from tests.families.gemma_models import FEEDS, build_gemma2, build_gemma3, build_gemma4
from tests.families.matrix_models import QWEN_NEXT
from tests.families.mixture_models import build_mixture, build_oss
from tests.families.parity import TOLERANCE, assert_close, run_drafts
from tests.families.streaming_models import (
    KEPT,
    LENGTH,
    NINE,
    SCORES,
    SINKS,
    WINDOW,
    masked,
    streaming_engine,
    streaming_recipe,
)

from cetane.checkpoint import StreamedCheckpoint
from cetane.errors import CetaneError
from cetane.planner import Planner, as_recipe_asks


@pytest.mark.parametrize("contract", ["readonly", "blend", "stateful"])
def test_split_layers(contract: str) -> None:
    """Layers that keep one head, two, none and all, under every contract that keeps sinks."""
    model = build_model("llama", **NINE)
    expected = masked(model, KEPT)
    assert np.abs(expected - masked(model, {}))[WINDOW + SINKS :].max() > 1e-2
    engine = streaming_engine(model, streaming_recipe(SCORES, contract))
    assert_close(engine, expected, FEEDS)
    drafted = run_drafts(engine)
    assert np.abs(drafted - expected[: len(drafted)]).max() <= TOLERANCE
    slots = {name: slots.count for name, slots in engine.plan.caches.items()}
    short = 64 if contract == "stateful" else 32
    assert slots == {
        "kv_1": 64, "kv_near_2": short, "kv_2": 64, "kv_near_1": short, "kv_near_3": short,
        "kv": 64,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("qwen3", {"head_dim": 8}),
        ("qwen2", {}),
        ("phi3", {"pad_token_id": 0}),
        ("olmo2", {}),
        ("granite", {"residual_multiplier": 0.4}),
        ("smollm3", {"no_rope_layers": [1, 0, 1, 1]}),
    ],
)
def test_families(kind: str, config: dict[str, Any]) -> None:
    """Biases, norms of heads or of all, one tensor of several projections, layers without turns."""
    model = build_model(kind, **NINE, **config)
    engine = streaming_engine(model, streaming_recipe(SCORES))
    assert_close(engine, masked(model, KEPT), {name: FEEDS[name] for name in ("uneven",)})


@pytest.mark.parametrize("kind", sorted(QWEN_NEXT))
def test_gated_attention(kind: str) -> None:
    """Qwen3.5's gates lie in one tensor with the queries, head by head, and move with them."""
    model = build_mixture(kind, **QWEN_NEXT[kind], max_position_embeddings=256)
    expected = masked(model, {1: (1,)})
    assert np.abs(expected - masked(model, {})).max() > 1e-2
    engine = streaming_engine(model, streaming_recipe([[], [0.1, 0.9], []]))
    assert_close(engine, expected, {"uneven": FEEDS["uneven"]})


def test_a_shift_cache_without_sinks() -> None:
    model = build_model("llama", **NINE)
    engine = streaming_engine(model, streaming_recipe(SCORES, "shift", sinks=0))
    assert_close(engine, masked(model, KEPT, sinks=0), FEEDS)
    with pytest.raises(CetaneError, match="a shift cache forgets the first tokens"):
        streaming_engine(model, streaming_recipe(SCORES, "shift"))
    engine = streaming_engine(model, streaming_recipe(SCORES, "shift", sliding="readonly"))
    assert_close(engine, masked(model, KEPT), {"uneven": FEEDS["uneven"]})


@pytest.mark.parametrize(("sinks", "window"), [(3, 64), (40, 24), (64, 1)])
def test_windows_that_hold_the_context(sinks: int, window: int) -> None:
    """Layers are cut, and nothing is lost."""
    model = build_model("llama", **NINE)
    engine = streaming_engine(model, streaming_recipe(SCORES, sinks=sinks, window=window))
    assert_close(engine, masked(model, {}), {"uneven": FEEDS["uneven"]})
    assert {slots.count for slots in engine.plan.caches.values()} == {LENGTH}


@pytest.mark.parametrize("full", [0.0, 1.0])
def test_none_and_all(full: float) -> None:
    model = build_model("llama", **NINE)
    engine = streaming_engine(model, streaming_recipe(SCORES, full=full))
    expected = masked(model, {} if full else dict.fromkeys(range(4), ()))
    assert_close(engine, expected, {"uneven": FEEDS["uneven"]})
    assert set(engine.plan.caches) == {"kv" if full else "kv_near_3"}


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_turned_channels(kind: str) -> None:
    """Values turn inside every head, so their order does not matter."""
    model = build_model(kind, **NINE)
    wanted = streaming_recipe(SCORES)
    compression = wanted.compression.model_copy(update={"rotate": True})
    engine = streaming_engine(model, wanted.model_copy(update={"compression": compression}))
    assert_close(engine, masked(model, KEPT), {"uneven": FEEDS["uneven"]})


def test_capacities() -> None:
    model = build_model("llama", **NINE)
    engine = streaming_engine(model, streaming_recipe(SCORES, capacities=[32]))
    assert_close(engine, masked(model, KEPT), FEEDS)


def test_by_layer_with_one_head() -> None:
    """Gemma 3 with one key/value head: a full layer streams as a whole, sliding ones stay."""
    layers = {
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "num_key_value_heads": 1,
    }
    model = build_gemma3(**layers)
    engine = streaming_engine(model, streaming_recipe([[0.1], [], [0.3]]))
    assert set(engine.plan.caches) == {"full", "full_near_1", "sliding"}
    expected = masked(model, {0: ()})
    assert np.abs(expected - masked(model, {})).max() > 1e-3
    assert_close(engine, expected, FEEDS)


def test_the_order_is_of_the_checkpoint() -> None:
    """Only rows and columns move, and only in layers whose first heads are not those that stay."""
    model = build_model("llama", **NINE)
    plain: Any = InMemoryCheckpoint(model)
    checkpoint = as_recipe_asks(plain, streaming_recipe(SCORES))
    assert isinstance(checkpoint, StreamedCheckpoint)
    assert {name.split(".")[2] for name in checkpoint.orders} == {"0", "1"}
    keys, queries, outputs = (
        f"model.layers.0.self_attn.{letter}_proj.weight" for letter in ("k", "q", "o")
    )
    before = plain.read(keys).reshape(3, 16, 72)
    assert torch.equal(checkpoint.read(keys).reshape(3, 16, 72), before[[1, 0, 2]])
    before = plain.read(queries).reshape(3, 48, 72)
    assert torch.equal(checkpoint.read(queries).reshape(3, 48, 72), before[[1, 0, 2]])
    before = plain.read(outputs).reshape(72, 3, 48)
    assert torch.equal(checkpoint.read(outputs).reshape(72, 3, 48), before[:, [1, 0, 2]])
    assert torch.equal(checkpoint.read_rows(keys, 3, 11), checkpoint.read(keys)[3:11])


def test_refusals() -> None:
    model = build_model("llama", **NINE)
    with pytest.raises(CetaneError, match="12 heads in 4 layers of this model can stream"):
        streaming_engine(model, streaming_recipe(SCORES[:3]))
    shared = build_gemma4()  # layers 2 and 3 hand their keys on
    with pytest.raises(CetaneError, match="1 heads in 1 layers of this model can stream"):
        streaming_engine(shared, streaming_recipe([[], [1.0], [], [1.0], [], []]))
    with pytest.raises(CetaneError, match="layer 1 cannot stream: they have learned sinks"):
        streaming_engine(build_oss(), streaming_recipe([[], [1.0, 0.0], []]))
    with pytest.raises(CetaneError, match="layer 1 cannot stream: a bound holds their scores"):
        streaming_engine(build_gemma2(), streaming_recipe([[], [1.0, 0.0], []]))
    with pytest.raises(CetaneError, match="layer 0 cannot stream: their scores fall with distance"):
        streaming_engine(build_alibi("mpt"), streaming_recipe([[1.0] * 16] * 2))
    plain: Any = InMemoryCheckpoint(model)
    with pytest.raises(CetaneError, match="heads are not in the order"):
        Planner(plain, streaming_recipe(SCORES))
