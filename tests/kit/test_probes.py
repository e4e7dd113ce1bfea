"""The probes of a kit: what they run, and logits that are the Hugging Face model's."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.conftest import build_model
from tests.engine.test_adapters import logits
from tests.families import gemma_models
from tests.families.parity import engine_of

from cetane.bundle import Bundle
from cetane.kit import probes
from cetane.kit.example_calls import function_calls
from cetane.kit.expectation import (
    expectation,
    is_complete,
    uncompared,
)
from cetane.kit.probes import ExpectedProbe, KitProbe, expected_probes, judged_positions

TOKENS = np.random.default_rng(0).integers(1, 288, 96).tolist()


def judged(probe: KitProbe) -> tuple[list[int], list[int]]:
    """The tokens of a probe, and the positions that it judges."""
    tokens: list[int] = []
    places: list[int] = []
    for call in probe.calls:
        own = range(len(tokens), len(tokens) + len(call.tokens))
        tokens += call.tokens
        if call.logits:
            places += own if probe.every else own[-1:]
    return tokens, places


def follows(expected: ExpectedProbe, model: Any) -> None:
    """Its logits are the model's, at all positions that it judges."""
    tokens, places = judged(expected.probe)
    wanted = logits(model, tokens)[places]
    np.testing.assert_allclose(expected.logits, wanted, rtol=0, atol=0.02)  # weights are fp16


def test_the_end_of_the_context_is_judged(tiny_bundle: Callable[..., Bundle]) -> None:
    """After a silent text: a verifying call, and 12 decoded tokens up to the last position."""
    made = {one.probe.name: one for one in expected_probes(tiny_bundle())}
    assert list(made) == ["text", "verify", "late"]
    _, places = judged(made["late"].probe)
    assert places == [*range(64 - 3 - 12, 64)]
    modes = [call.mode for call in made["late"].probe.calls if call.logits]
    assert modes == ["verify", *["decode"] * 12]
    for expected in made.values():
        follows(expected, build_model("llama"))


@pytest.mark.parametrize(
    ("limit", "value", "tokens"), [("WORK", 1, 0), ("MOST_CALLS", 3, 24), ("MOST_CALLS", 1, 0)]
)
def test_the_text_before_the_end_has_a_limit(
    limit: str,
    value: int,
    tokens: int,
    tiny_bundle: Callable[..., Bundle],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three calls of eight tokens reach 24. A text no longer than the prompt shows nothing new."""
    monkeypatch.setattr(probes, limit, value)
    late = [one for one in expected_probes(tiny_bundle()) if one.probe.name == "late"]
    assert [judged(one.probe)[1][0] for one in late] == [tokens] * bool(tokens)


@pytest.mark.parametrize(("before", "verified"), [(80, True), (62, False)])
def test_windows_are_in_use_again(
    before: int, verified: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state of 64 slots, and a context of 96. No call can run over the end of a state."""
    monkeypatch.setattr(probes, "most_tokens", lambda _: before)
    model = gemma_models.build_gemma3()
    engine = engine_of(model, gemma_models.recipe("stateful", context=96))
    monkeypatch.setattr(probes, "PortableBackend", lambda *_: engine.backend)
    tokenizer = SimpleNamespace(bos_id=None, encode=lambda _: TOKENS)
    bundle: Any = SimpleNamespace(
        plan=engine.plan, tables=lambda: engine.tables, tokenizer=tokenizer
    )
    late = expected_probes(bundle)[-1]
    assert ("verify" in [call.mode for call in late.probe.calls]) == verified
    assert judged(late.probe)[1] == [*range(before, before + 4 + 12)]
    assert [slots.count for slots in engine.plan.caches.values() if slots.limited] == [64]
    follows(late, model)


def test_every_adapter_is_judged(adapted: Any) -> None:
    """Its functions, each alone, and its logits, which are those of the merged model."""
    plan, made = adapted.bundle.plan, expected_probes(adapted.bundle)
    assert [one.probe.adapter for one in made] == [None, "dora", "plain", None]
    for expected in made:
        follows(expected, adapted.merged[expected.probe.adapter])
    whole = expectation(plan, made, function_calls(adapted.bundle))
    assert whole.functions.keys() == {"/".join(key) for key in plan.functions}
    assert all(whole.functions.values()) and not uncompared(plan, whole)
    assert is_complete(plan, whole, judged_positions(adapted.bundle))


def test_every_contract_can_be_judged(variant: Bundle) -> None:
    """All functions have an output to compare, and the end of the context is reached."""
    made = expected_probes(variant)
    whole = expectation(variant.plan, made, function_calls(variant))
    assert not uncompared(variant.plan, whole)
    assert is_complete(variant.plan, whole, judged_positions(variant))
    assert judged(made[-1].probe)[1][-1] == variant.plan.recipe.cache.context - 1
    for expected in made:
        follows(expected, build_model("llama"))
