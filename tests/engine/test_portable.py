"""Tokens from a bundle are transformers' own, for every contract and layout, on both executors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.engine.rows import same_alone_and_among

import cetane.mil.fast.translate
from cetane.bundle import Bundle
from cetane.checkpoint import open_checkpoint
from cetane.engine.engine import Engine
from cetane.engine.generate import generate
from cetane.engine.open import open_engine
from cetane.engine.portable import CompiledProgram, PortableBackend, ReferenceProgram
from cetane.engine.sampling import Sampler
from cetane.errors import CetaneError
from cetane.files import silent
from cetane.lab.models import gemma_tiny
from cetane.pipeline.build import build
from cetane.schema.recipe import parse_recipe

DRAW = np.random.default_rng(4)
PROMPTS = {length: DRAW.integers(1, 288, length).tolist() for length in (1, 2, 8, 11, 37)}
"""By length: one token, fewer and more than a prefill, and several prefills."""
NEW = 16


@pytest.fixture(scope="module")
def truth(tiny_checkpoint_folder: Path) -> dict[int, list[int]]:
    """Greedy continuations by transformers, with weights as fp16 holds them."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tiny_checkpoint_folder, dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half())
    return {
        length: model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, length),
            do_sample=False,
            max_new_tokens=NEW,
            eos_token_id=None,
            pad_token_id=0,
        )[0, length:].tolist()
        for length, prompt in PROMPTS.items()
    }


@pytest.fixture(params=["fast", "reference"])
def engine(
    request: pytest.FixtureRequest, variant: Bundle, monkeypatch: pytest.MonkeyPatch
) -> Engine:
    """An engine on each executor."""
    if request.param == "reference":
        monkeypatch.setattr(cetane.mil.fast.translate, "unsupported", lambda _: ["every op"])
    kinds = {"fast": CompiledProgram, "reference": ReferenceProgram}
    engine = Engine(variant.plan, PortableBackend(variant), variant.tables())
    for shard in variant.plan.shards:
        assert type(engine.open(shard.name)) is kinds[request.param]
    return engine


def test_tokens(engine: Engine, truth: dict[int, list[int]]) -> None:
    for length, prompt in PROMPTS.items():
        assert list(generate(engine.session(), prompt, Sampler(), NEW)) == truth[length], length


def test_sessions_are_independent(engine: Engine, truth: dict[int, list[int]]) -> None:
    """Two conversations on one engine, token by token in turn."""
    streams = {n: generate(engine.session(), PROMPTS[n], Sampler(), NEW) for n in (2, 11)}
    found: dict[int, list[int]] = {n: [] for n in streams}
    for _ in range(NEW):
        for length, stream in streams.items():
            found[length].append(next(stream))
    assert found == {length: truth[length] for length in streams}


def test_fp16_runs_the_reference_in_fp16(variant: Bundle, truth: dict[int, list[int]]) -> None:
    backend = PortableBackend(variant, "fp16")
    engine = Engine(variant.plan, backend, variant.tables())
    values: list[np.ndarray] = []
    session = engine.session(watch=[lambda step, name, value, tokens: values.append(value)])
    session.feed(PROMPTS[11])
    assert all(isinstance(engine.open(s.name), ReferenceProgram) for s in variant.plan.shards)
    assert {value.dtype for value in values} == {np.dtype(np.float16)}


def test_the_context_is_filled_and_not_passed(variant: Bundle) -> None:
    engine = Engine(variant.plan, PortableBackend(variant), variant.tables())
    session = engine.session()
    tokens = list(generate(session, PROMPTS[37], Sampler(), 1000))
    assert len(tokens) == 64 - 37 + 1
    assert session.position == 64
    with pytest.raises(CetaneError, match="do not fit a context of 64"):
        session.feed([1])
    with pytest.raises(CetaneError, match="do not fit a context of 64"):
        engine.session().feed([1] * 65)


@pytest.mark.parametrize("contract", ["readonly", "blend", "shift", "stateful"])
@pytest.mark.parametrize("arithmetic", ["fp32", "reference", "fp16", "stored"])
def test_a_token_has_the_same_logits_alone_and_among_others(
    tiny_bundle: Callable[..., Bundle],
    contract: str,
    arithmetic: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit, after prompts of any length."""
    bundle = tiny_bundle(contract=contract, layout={"kind": "single"}, prefill=None)
    if arithmetic == "reference":
        monkeypatch.setattr(cetane.mil.fast.translate, "unsupported", lambda _: ["every op"])
        arithmetic = "fp32"
    engine = Engine(bundle.plan, PortableBackend(bundle, arithmetic), bundle.tables())
    same_alone_and_among(engine, [PROMPTS[2], PROMPTS[37]])


@pytest.mark.parametrize("contract", ["readonly", "blend", "shift", "stateful"])
def test_a_call_of_few_tokens_is_narrow(tiny_bundle: Callable[..., Bundle], contract: str) -> None:
    """The function for two tokens runs, in every shard, and others where they take all tokens."""
    bundle = tiny_bundle(contract=contract, layout={"kind": "chunks", "chunks": 2})
    engine = open_engine(bundle, "portable")
    session = engine.session()
    for tokens, function in (([7], "decode"), ([7, 8], "verify@2"), ([7, 8, 9], "verify")):
        engine.shards.restart_clocks()
        session.evaluate(tokens)
        shards = [shard.name for shard in bundle.plan.shards]
        assert list(engine.shards.times) == [(shard, function) for shard in shards]


def test_few_tokens_hand_shared_windows_on(tmp_path: Path) -> None:
    """Gemma 4's layers hand a window and the new columns to a later shard: of fewer tokens these
    are fewer columns, but not in proportion."""
    content = {
        "name": "shared", "cache": {"context": 128, "contract": "readonly"},
        "tokens": {"verify": 4, "prefill": None}, "layout": {"kind": "chunks", "chunks": 2},
        "compression": {"default": "int8-per-channel"}, "embedding": {"format": "int8"},
    }  # fmt: skip
    made = build(
        open_checkpoint(gemma_tiny()), parse_recipe(content, "test"), tmp_path / "b", silent
    )
    engine = Engine(made.plan, PortableBackend(made, "stored"), made.tables())
    same_alone_and_among(engine, [PROMPTS[2]])
    assert any(function == "verify@2" for _, function in engine.shards.times)


def test_a_stop_token_ends_an_answer(variant: Bundle, truth: dict[int, list[int]]) -> None:
    engine = Engine(variant.plan, PortableBackend(variant), variant.tables())
    stop = truth[8][4]
    expected = truth[8][: truth[8].index(stop)]
    assert list(generate(engine.session(), PROMPTS[8], Sampler(), NEW, [stop])) == expected


@pytest.mark.parametrize("tokens", [[], [288], [-1], [3, 10**12]])
def test_tokens_that_cannot_be_run(tiny_bundle: Callable[..., Bundle], tokens: list[int]) -> None:
    bundle = tiny_bundle(contract="blend", shapes="range", layout={"kind": "chunks", "chunks": 1})
    engine = open_engine(bundle, "portable")
    with pytest.raises(CetaneError, match="token"):
        engine.session().feed(tokens)


def test_backends(tiny_bundle: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = tiny_bundle(contract="blend", shapes="range", layout={"kind": "chunks", "chunks": 1})
    chosen: dict[str, Any] = {}
    monkeypatch.setattr(
        "cetane.engine.open.CoreMLBackend", lambda b, units: chosen.setdefault("b", b)
    )
    monkeypatch.setattr("cetane.engine.open.sys.platform", "linux")
    assert isinstance(open_engine(bundle).backend, PortableBackend)
    assert not chosen
    monkeypatch.setattr("cetane.engine.open.sys.platform", "darwin")
    assert isinstance(open_engine(bundle, "portable").backend, PortableBackend)
    assert open_engine(bundle).backend is bundle
    with pytest.raises(CetaneError, match="unknown backend 'gpu'; known: auto, portable, coreml"):
        open_engine(bundle, "gpu")
