"""Caches of 8 bits: the port is transformers' model, of which each call's keys and values are
rounded by hand."""

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import InMemoryCheckpoint, build_model
from tests.families.gemma_models import NO_TIES, build_gemma2, build_gemma3, build_gemma4
from tests.families.latent_models import DEEPSEEK
from tests.families.matrix_models import QWEN_NEXT
from tests.families.mixture_models import build_mixture, build_oss
from tests.families.parity import assert_close, engine_of, tokens, truth
from tests.families.recipes import int8_recipe
from tests.families.zaya_models import build_zaya

from cetane.errors import CetaneError
from cetane.families.grouped_query import AttentionHeads, Rounded, attend, rounded
from cetane.planner import Planner

FEEDS = {
    "prefill": [32],
    "steps": [*[1] * 8, 16, *[1] * 8],
    "uneven": [5, 1, 11, 2, 4, 3, 6],
}
BUILDERS: dict[str, Callable[[], Any]] = {
    "llama": lambda: build_model("llama"),
    "qwen2": lambda: build_model("qwen2"),
    "qwen3": lambda: build_model("qwen3"),
    "gemma2": lambda: build_gemma2(sliding_window=11),
    "gemma3": lambda: build_gemma3(sliding_window=11),
    "gemma4": lambda: build_gemma4(**NO_TIES),
    "zaya": build_zaya,
    "gpt_oss": build_oss,
    "qwen3_next": lambda: build_mixture("qwen3_next", **QWEN_NEXT["qwen3_next"]),
}


def by_hand(columns: torch.Tensor) -> torch.Tensor:
    """Keys or values `(1, KV, T, D)`: 127 steps to the largest of each token and head."""
    held = columns.numpy()
    scales = np.maximum(np.abs(held).max(-1, keepdims=True) * np.float32(129 / 1024), 2.0**-10)
    codes = np.rint(held / scales * np.float32(16)).astype(np.int8)
    assert np.abs(codes).max() <= 127
    return torch.from_numpy(codes * (scales / np.float32(16)))


def rounding(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the attention of a transformers model read rounded keys and values."""
    module = importlib.import_module(type(model).__module__)
    plain = module.eager_attention_forward

    def forward(layer: Any, query: Any, key: Any, value: Any, *others: Any, **named: Any) -> Any:
        return plain(layer, query, by_hand(key), by_hand(value), *others, **named)

    monkeypatch.setattr(module, "eager_attention_forward", forward)


@pytest.mark.parametrize("kind", BUILDERS)
def test_families(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beside drafts that are refused; and rounding is no small thing."""
    model = BUILDERS[kind]()
    exact = truth(model)
    rounding(model, monkeypatch)
    expected = truth(model)
    assert np.abs(expected - exact).max() > 1e-3
    assert_close(engine_of(model, int8_recipe()), expected, FEEDS, drafts=True)


def test_layouts_and_capacities(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers alone and together, channels last, and caches that grow twice."""
    model = build_gemma4(**NO_TIES)
    rounding(model, monkeypatch)
    expected = truth(model, 96)
    cache = {"context": 96, "capacities": [32, 64]}
    for layout in ({"kind": "single"}, {"kind": "per-block"}):
        made = int8_recipe(layout=layout, tensor_layout="ct1", cache=cache)
        assert_close(engine_of(model, made), expected, {"uneven": [5, 1, 30, 2, 40, 18]})


def test_a_mark_is_a_return() -> None:
    engine = engine_of(build_gemma3(sliding_window=11), int8_recipe())
    ids = tokens(engine.plan.vocab)
    session, straight = engine.session(), engine.session()
    session.feed(ids[:13])
    mark = session.mark()
    session.feed(ids[20:29])
    session.rewind(mark)
    straight.feed(ids[:13])
    np.testing.assert_array_equal(session.feed(ids[13:]), straight.feed(ids[13:]))


def test_the_host_keeps_bytes_and_scales() -> None:
    """The plan says so, and the memory of a session holds what the rounding by hand gives."""
    engine = engine_of(build_model("llama"), int8_recipe(layout={"kind": "single"}))
    function = engine.plan.functions["model", "verify"]
    given = {item.name: (item.dtype, item.shape, item.source.host) for item in function.inputs}
    assert given["kv_k"] == given["kv_v"] == ("int8", (2, 2, 16, 32), "cache")
    assert given["kv_k_scales"] == given["kv_v_scales"] == ("fp16", (2, 2, 1, 32), "cache")
    taken = {item.name: (item.dtype, item.shape) for item in function.outputs}
    assert taken["kv_v_out"] == ("fp16", (2, 2, 16, 4))
    assert taken["kv_v_scales_out"] == ("fp16", (2, 2, 1, 4))
    assert engine.plan.kv_bytes[32] == 2 * 2 * 2 * 32 * (16 + 2)
    session = engine.session()
    session.feed(tokens(engine.plan.vocab, 20))
    kept = session.memory.caches
    codes, scales = kept["model.kv_k"], kept["model.kv_k_scales"]
    assert codes.dtype == np.int8 and scales.dtype == np.float32
    assert np.all(np.abs(codes[..., :20]).max(2) == 127)
    assert not codes[..., 20:].any()


def test_a_column_of_zeros_and_a_large_one() -> None:
    """Neither divides by zero, nor leaves eight bits."""
    x = torch.zeros(1, 1, 4, 3)
    x[..., 1], x[0, 0, 2, 2] = 1e-5, 6e4
    made = rounded(x)
    assert made.codes[..., 0].abs().max() == 0
    assert made.codes.abs().max() == 127
    np.testing.assert_allclose(made.widened()[..., 2], x[..., 2], rtol=1 / 127)


@pytest.mark.parametrize("block", [None, 16])
@pytest.mark.parametrize("cap", [None, 5.0])
def test_attention_is_that_of_widened_columns(block: int | None, cap: float | None) -> None:
    """Of all keys together and in blocks, with hidden keys and empty slots among them."""
    torch.manual_seed(1)
    heads = AttentionHeads(4, 2, 8, 0.5, block, cap)
    q, k, v = (torch.randn(1, n, 8, s) * 3 for n, s in ((4, 3), (2, 51), (2, 51)))
    mask = torch.where(torch.rand(1, 1, 6, 51) < 0.4, -4e4, 0.0)
    mask[..., 16:32] = -4e4
    keys, values = rounded(k), rounded(v)
    empty = torch.ones(51)
    empty[20:30] = 0
    values = Rounded(values.codes, values.scales * empty)
    expected = attend(q, keys.widened(), values.widened(), mask, heads)
    torch.testing.assert_close(attend(q, keys, values, mask, heads), expected)


def test_a_token_that_sees_nothing_is_finite() -> None:
    """As padding, whose mask hides all keys, before any token."""
    heads, nothing = AttentionHeads(2, 1, 8, 1.0), rounded(torch.zeros(1, 1, 8, 5))
    empty = Rounded(nothing.codes, torch.zeros_like(nothing.scales))
    mask = torch.full((1, 1, 4, 5), -4e4)
    assert attend(torch.ones(1, 2, 8, 2), empty, empty, mask, heads).isfinite().all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: build_mixture("deepseek_v2", **DEEPSEEK), "its layers keep latents"),
        (lambda: build_mixture("qwen3_next", **QWEN_NEXT["qwen3_next"] | {
            "layer_types": ["linear_attention"] * QWEN_NEXT["qwen3_next"]["num_hidden_layers"]}),
         "its layers keep no keys and values"),
    ],
)  # fmt: skip
def test_models_without_keys_and_values(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(CetaneError, match=message):
        Planner(InMemoryCheckpoint(make()), int8_recipe())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"cache": {"contract": "blend"}}, "contract = 'readonly'"),
        ({"cache": {"sliding": "shift"}}, "for sliding layers too"),
        ({"target": {"deployment": "iOS18"}}, "target.deployment = 'iOS26'"),
    ],
)
def test_recipes_that_do_not_fit(content: dict[str, Any], message: str) -> None:
    with pytest.raises(CetaneError, match=message):
        int8_recipe(**content)


def test_the_default_is_not_in_a_manifest() -> None:
    assert "format" not in int8_recipe("fp16").model_dump()["cache"]
    assert int8_recipe("int8").model_dump()["cache"]["format"] == "int8"
