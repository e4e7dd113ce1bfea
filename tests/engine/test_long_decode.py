"""Thousands of calls in a row: nothing is kept that should not be, and nothing drifts."""

import gc
import os
import tracemalloc
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
from tests.conftest import build_model, build_tokenizer, tiny_recipe

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint, open_checkpoint
from cetane.engine import shards
from cetane.engine.engine import Engine
from cetane.engine.generate import generate
from cetane.engine.portable import CompiledProgram, PortableBackend, ReferenceProgram
from cetane.engine.sampling import Sampler
from cetane.engine.session import Session
from cetane.pipeline.build import build

CONTEXT = 2080
PROMPT = [5, 99, 201, 7]
WARM_UP = 200
STEPS = {"fast": 1000, "reference": 240}
STATM = Path("/proc/self/statm")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The tiny llama, with positions for a long text."""
    folder = tmp_path_factory.mktemp("long-llama")
    build_model("llama", max_position_embeddings=CONTEXT).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return open_checkpoint(folder)


@pytest.fixture(scope="module", params=["stateful", "readonly"])
def bundle(
    request: pytest.FixtureRequest, checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory
) -> Bundle:
    recipe = tiny_recipe(
        request.param, verify=None, prefill=32, context=CONTEXT, layout={"kind": "single"}
    )
    return build(checkpoint, recipe, tmp_path_factory.mktemp("bundles") / "long", lambda *_: None)


@pytest.fixture(params=STEPS)
def engine(
    request: pytest.FixtureRequest, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> Engine:
    if request.param == "reference":
        monkeypatch.setattr("cetane.mil.fast.translate.unsupported", lambda _: ["every op"])
    engine = Engine(bundle.plan, PortableBackend(bundle), bundle.tables())
    kinds = {"fast": CompiledProgram, "reference": ReferenceProgram}
    assert {type(engine.open(s.name)) for s in bundle.plan.shards} == {kinds[request.param]}
    return engine


@pytest.fixture
def steps(request: pytest.FixtureRequest) -> int:
    return STEPS[request.node.callspec.params["engine"]]


def resident() -> int:
    """Bytes of this process's memory."""
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def sampled(session: Session, steps: int) -> list[int]:
    """Tokens of calls of one token each. They are drawn, since greedy ones of a random model repeat
    themselves, and would hide a cache that is not written."""
    return list(generate(session, PROMPT, Sampler(temperature=1.0, seed=3), steps))


@pytest.mark.skipif(not STATM.exists(), reason="Linux tells")
def test_memory_does_not_grow(engine: Engine, steps: int) -> None:
    session = engine.session(["decode"])
    tokens = generate(session, PROMPT, Sampler(temperature=1.0, seed=3), steps)
    half = (steps - WARM_UP) // 2
    sizes = []
    for count in (WARM_UP, half, half):
        assert len(list(islice(tokens, count))) == count
        sizes.append(resident())
    # To keep what the host makes for a call would take 2.5 MB and more in each half: a mask has 8
    # kB. What earlier tests left behind may be touched once, but not in both.
    assert min(after - before for before, after in pairwise(sizes)) < 1e6


def test_a_call_leaves_no_objects_behind(engine: Engine) -> None:
    session = engine.session(["decode"])
    session.feed(PROMPT)
    tracemalloc.start()
    try:
        sizes = []
        for _ in range(4):  # pools and free lists fill up by chance, objects in every turn
            for token in range(50):
                session.feed([token])
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    # The least array that a call makes takes 300 bytes.
    assert min(later - sooner for sooner, later in pairwise(sizes)) < 50 * 300


def test_only_the_times_of_the_latest_calls_are_kept(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "RECENT", 20)
    session = engine.session(["decode"])
    for token in range(50):
        session.feed([token])
    assert [len(times) for times in engine.shards.times.values()] == [20]


@pytest.mark.parametrize("engine", ["fast"], indirect=True)
def test_tokens_do_not_drift(engine: Engine, steps: int) -> None:
    """Another session draws the same tokens, and a prefill of them all gives the same logits."""
    session = engine.session(["decode"])
    tokens = sampled(session, steps)
    assert len(set(tokens)) > 100
    assert sampled(engine.session(["decode"]), steps) == tokens
    last = session.feed(tokens[-1:])
    whole = engine.session(["prefill"]).feed([*PROMPT, *tokens])
    assert last is not None and whole is not None
    np.testing.assert_allclose(last, whole, rtol=1e-3, atol=1e-3)
    assert last.argmax() == whole.argmax()
