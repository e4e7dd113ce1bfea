"""Caches of 8 bits on the portable executors: one answer for all of them, whatever the calls."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.engine.rows import same_alone_and_among

import cetane.mil.fast.translate
from cetane.bundle import Bundle
from cetane.engine.engine import Engine
from cetane.engine.generate import generate
from cetane.engine.portable import CompiledProgram, PortableBackend, ReferenceProgram
from cetane.engine.prefixes import Prefixes
from cetane.engine.sampling import Sampler

DRAW = np.random.default_rng(4)
PROMPTS = {length: DRAW.integers(1, 288, length).tolist() for length in (2, 11, 37)}
ARITHMETICS = ["fp32", "reference", "fp16", "stored"]


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Callable[..., Bundle]) -> Bundle:
    return made(tiny_bundle)


def made(tiny_bundle: Callable[..., Bundle], **cache: Any) -> Bundle:
    return tiny_bundle(
        cache={"context": 64, "format": "int8"} | cache,
        target={"deployment": "iOS26"},
        layout={"kind": "single"},
    )


def engine_of(bundle: Bundle, arithmetic: Any, monkeypatch: pytest.MonkeyPatch) -> Engine:
    if arithmetic == "reference":
        monkeypatch.setattr(cetane.mil.fast.translate, "unsupported", lambda _: ["every op"])
        arithmetic = "fp32"
    return Engine(bundle.plan, PortableBackend(bundle, arithmetic), bundle.tables())


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_a_token_has_the_same_logits_alone_and_among_others(
    bundle: Bundle, arithmetic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: the columns of a call are rounded before they are read."""
    engine = engine_of(bundle, arithmetic, monkeypatch)
    same_alone_and_among(engine, [PROMPTS[2], PROMPTS[37]])


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_executors_agree(bundle: Bundle, arithmetic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With each other, and the tape and the graphs are what runs."""
    expected = list(
        generate(engine_of(bundle, "fp32", monkeypatch).session(), PROMPTS[11], Sampler(), 16)
    )
    engine = engine_of(bundle, arithmetic, monkeypatch)
    kind = ReferenceProgram if arithmetic in ("reference", "fp16") else CompiledProgram
    assert type(engine.open("model")) is kind
    logits = engine.session().feed(PROMPTS[37])
    monkeypatch.undo()
    exact = engine_of(bundle, "fp32", monkeypatch).session().feed(PROMPTS[37])
    np.testing.assert_allclose(logits, exact, atol=2e-2 if arithmetic == "fp16" else 1e-4)
    if arithmetic != "fp16":
        assert list(generate(engine.session(), PROMPTS[11], Sampler(), 16)) == expected


def test_a_tape_has_all_functions(bundle: Bundle) -> None:
    from cetane.mil import load
    from cetane.mil.fast.tape.model import TapeModel

    tapes = TapeModel(load(bundle.shard("model"))).tapes
    assert set(tapes) == {"decode", "verify", "verify@2", "prefill", "prefill@4"}


@pytest.mark.parametrize("arithmetic", ["fp32", "stored"])
def test_capacities_change_nothing(
    bundle: Bundle, tiny_bundle: Callable[..., Bundle], arithmetic: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Bytes and scales grow between calls, to the same bits."""
    growing = made(tiny_bundle, capacities=[32])
    engines = [engine_of(b, arithmetic, monkeypatch) for b in (bundle, growing)]
    answers = [list(generate(e.session(), PROMPTS[11], Sampler(), 40)) for e in engines]
    assert answers[0] == answers[1]
    rows = [e.session().feed(PROMPTS[37]) for e in engines]
    np.testing.assert_array_equal(rows[0], rows[1])


@pytest.mark.parametrize("arithmetic", ["reference", "stored"])
def test_trees(bundle: Bundle, arithmetic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A branch has the logits of a line, and only its path is kept."""
    engine = engine_of(bundle, arithmetic, monkeypatch)
    line, tree = engine.session(), engine.session()
    line.feed(PROMPTS[11])
    tree.feed(PROMPTS[11])
    single = [np.array(line.feed([token])) for token in (7, 9)]
    rows = tree.evaluate([7, 8, 9], parents=[-1, -1, 0])
    np.testing.assert_array_equal(rows[[0, 2]], single)
    tree.accept_path([0, 2])
    np.testing.assert_array_equal(tree.feed([5]), line.feed([5]))


def test_a_known_start_gives_the_same_bits(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(bundle, "stored", monkeypatch)
    prefixes, prompt = Prefixes(engine), PROMPTS[37]
    for ids in (prompt[:20], prompt, [*prompt[:17], 5, 6]):
        fed = prefixes.feed(ids)
        np.testing.assert_array_equal(fed.logits, Prefixes(engine, most=0).feed(ids).logits)
    assert fed.cached == 16


def test_another_arithmetic_goes_on(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes bytes as they are, and scales in its own type, as the golden gate needs it."""
    exact, halves = (engine_of(bundle, a, monkeypatch).session() for a in ("fp32", "fp16"))
    exact.feed(PROMPTS[37])
    halves.take(exact)
    kept = halves.memory.caches
    assert {name: a.dtype for name, a in kept.items()} == {
        f"model.kv_{part}{end}": np.dtype(np.float16 if end else np.int8)
        for part in "kv"
        for end in ("", "_scales")
    }
    np.testing.assert_array_equal(kept["model.kv_k"], exact.memory.caches["model.kv_k"])
    np.testing.assert_allclose(halves.feed([3]), exact.feed([3]), atol=2e-2)
