"""The model drafts for itself with a part of its keys: the same tokens, the right columns."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import build_model, tiny_recipe
from tests.families.gemma_models import build_gemma3
from tests.families.parity import engine_of

from cetane.bundle import Bundle
from cetane.engine.backend import Array
from cetane.engine.engine import Engine
from cetane.engine.generate import generate
from cetane.engine.portable import PortableBackend
from cetane.engine.sampling import Sampler
from cetane.engine.verify import Draft
from cetane.errors import CetaneError
from cetane.speculate.controller import Controller
from cetane.speculate.ngram import Ngram
from cetane.speculate.open import DrafterOptions, open_drafters
from cetane.speculate.speculator import Speculator
from cetane.speculate.triforce import EVERY, WAIT, TriForce, repeated

CACHE = {"contract": "readonly", "context": 160, "capacities": [32]}
PROMPT = np.random.default_rng(3).integers(1, 288, 70).tolist()
PROMPT[50:60] = PROMPT[20:30]
MODELS: dict[str, Callable[..., Any]] = {
    "llama": lambda: build_model("llama"),
    "gemma3": lambda: build_gemma3(sliding_window=16),
    "lfm2": lambda: build_model("lfm2", layer_types=["conv", "full_attention"]),
}
"""Their layers see all tokens, a window of them, or a history."""


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest) -> tuple[Any, Engine]:
    model = MODELS[request.param]()
    return model, engine_of(model, tiny_recipe(verify=4, cache=CACHE))


def plain(engine: Engine, prompt: Sequence[int] = PROMPT, temperature: float = 0.0) -> list[int]:
    """60 tokens without drafts, generated once."""
    return once(engine, tuple(prompt), temperature)


@functools.cache
def once(engine: Engine, prompt: tuple[int, ...], temperature: float) -> list[int]:
    return list(generate(engine.session(), prompt, Sampler(temperature, seed=1), 60))


class Recording(TriForce):
    """Writes down, for every draft, the text, the positions that it read, and its first logits."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.plan)
        self.unlikely = 0.0  # whole drafts, however unsure
        self.seen: list[tuple[list[int], Array, Array]] = []

    def likely(self, rows: Any, most: int) -> Draft:
        (held,) = (
            slots.copy()
            for name, slots in self.memory.slots.items()
            if not self.memory.groups[name].limited
        )

        def noted() -> Any:
            for number, row in enumerate(rows):
                if not number:
                    self.seen.append((list(self.tokens), held, row))
                yield row

        return super().likely(noted(), most)


@torch.inference_mode()
def masked(model: Any, text: list[int], positions: Array) -> Array:
    """transformers' logits of a text whose last token sees only itself and these positions."""
    count, config = len(text), model.config
    causal = torch.ones(count, count, dtype=torch.bool).tril()
    last = torch.zeros(count, dtype=torch.bool)
    last[positions] = True
    last[-1] = True
    part = causal.clone()
    part[-1] &= last

    def bias(seen: Any) -> Any:
        return torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]

    mask: Any = bias(part)
    if config.model_type == "gemma3_text":
        near = causal & ~torch.ones(count, count, dtype=torch.bool).tril(-config.sliding_window)
        mask = {"full_attention": bias(part), "sliding_attention": bias(near)}
    ids = torch.tensor([text])
    logits: Array = model(ids, attention_mask=mask, use_cache=False).logits[0, -1].numpy()
    return logits


def test_a_draft_has_the_logits_of_a_model_that_sees_only_its_columns(pair) -> None:
    """In every draft of a text: after slots were chosen, after drafts that were refused, and when
    the newest tokens have taken each other's slots."""
    model, engine = pair
    drafter = Recording(engine)
    speculator = Speculator([drafter], 3)
    found = list(generate(engine.session(), PROMPT, Sampler(), 60, (), speculator))
    assert found == plain(engine)
    assert len(drafter.seen) > EVERY
    assert 0 < speculator.counters.accepted < speculator.counters.drafted
    for text, held, logits in drafter.seen:
        assert {0, *range(len(text) - 13, len(text) - 1)} <= set(held) and max(held) < len(text) - 1
        assert len(set(held)) == 32
        assert np.abs(logits - masked(model, text, held)).max() <= 1e-4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("controlled", [False, True])
def test_a_text_is_the_same_with_it(pair, temperature: float, controlled: bool) -> None:
    """From a prompt that fits the smaller capacity on, too, where nothing is drafted."""
    _, engine = pair
    for prompt in (PROMPT, PROMPT[:20]):
        controller = Controller({1: [1.0], 4: [1.1], 8: [1.2]}) if controlled else None
        drafter = Recording(engine)
        speculator = Speculator([drafter], 3, controller)
        sampler = Sampler(temperature, seed=1)
        found = list(generate(engine.session(), prompt, sampler, 60, (), speculator))
        assert found == plain(engine, prompt, temperature)
        assert controlled or speculator.counters.drafted
        assert all(len(text) > max(32, len(prompt) + WAIT - 1) for text, _, _ in drafter.seen)


@pytest.mark.parametrize("arithmetic", ["fp32", "fp16", "stored"])
@pytest.mark.parametrize("default", ["fp16", "int8-per-channel"])
def test_bundles_say_the_same(
    tiny_bundle: Callable[..., Bundle], arithmetic: Any, default: str
) -> None:
    bundle = tiny_bundle(
        verify=4, cache=CACHE, compression={"default": default}, layout={"kind": "single"}
    )
    engine = Engine(bundle.plan, PortableBackend(bundle, arithmetic), bundle.tables())
    lookups, drafter = open_drafters(DrafterOptions("triforce"), bundle, Sampler(), "portable")
    assert isinstance(lookups, Ngram)
    speculator = Speculator([drafter], 3)
    found = list(generate(engine.session(), PROMPT, Sampler(), 60, (), speculator))
    assert found == plain(engine)
    assert speculator.counters.accepted


def test_a_long_text_shows_the_cost_of_a_draft(pair) -> None:
    """Before the first draft: after a long prompt, or when the text has grown."""
    _, engine = pair
    for prompt, known in ((PROMPT[:20], False), (PROMPT, True)):
        controller = Controller({1: [1.0], 4: [1.1], 8: [1.2]})
        drafter = TriForce(engine.plan)
        speculator = Speculator([drafter], 3, controller)
        session = engine.session()
        stream = generate(session, prompt, Sampler(), 60, (), speculator)
        next(stream)
        assert (drafter.times is not None) == known
        assert "triforce" not in controller.in_steps
        assert [*stream] == plain(engine, prompt)[1:]
        assert "triforce" in controller.in_steps
    assert drafter.times is not None and 0 < drafter.times.token < 1


def test_a_prompt_that_fills_the_context_gets_its_one_token(pair) -> None:
    """There is no room for the call that would measure a draft."""
    model, engine = pair
    prompt = np.random.default_rng(4).integers(1, 288, 160).tolist()
    with torch.inference_mode():
        expected = int(model(torch.tensor([prompt])).logits[0, -1].argmax())
    speculator = Speculator([TriForce(engine.plan)], 3)
    found = list(generate(engine.session(), prompt, Sampler(), 20, (), speculator))
    assert found == [expected]


def test_it_drafts_by_default_where_it_can(tiny_bundle: Callable[..., Bundle]) -> None:
    """Beside look-ups, in a bundle of several capacities that has no draft head."""
    for cache, expected in ((CACHE, ["suffix", "ngram", "triforce"]),
                            (CACHE | {"capacities": []}, ["suffix", "ngram"])):  # fmt: skip
        bundle = tiny_bundle(verify=4, cache=cache, layout={"kind": "single"})
        drafters = open_drafters(DrafterOptions(), bundle, Sampler(), "portable")
        assert [drafter.name for drafter in drafters] == expected


def test_int8_caches_are_gathered_with_their_scales() -> None:
    model = build_model("llama")
    cache, target = CACHE | {"format": "int8"}, {"deployment": "iOS26"}
    engine = engine_of(model, tiny_recipe(verify=4, cache=cache, target=target))
    speculator = Speculator([TriForce(engine.plan)], 3)
    found = list(generate(engine.session(), PROMPT, Sampler(), 40, (), speculator))
    assert found == plain(engine)[:40]
    assert speculator.counters.accepted


def test_a_conversation_goes_on(pair) -> None:
    """Also from an earlier place, with another text."""
    _, engine = pair
    session, speculator = engine.session(), Speculator([TriForce(engine.plan)], 3)
    first = list(generate(session, PROMPT, Sampler(), 30, (), speculator))
    mark = session.mark()
    second = list(generate(session, first[-1:], Sampler(), 30, (), speculator))
    assert first + second == plain(engine)
    session.rewind(mark)
    other = [5, 7, *PROMPT[:12]]
    third = list(generate(session, other, Sampler(), 30, (), speculator))
    assert third == plain(engine, [*PROMPT, *first[:-1], *other])[:30]


def test_the_surroundings_of_earlier_matches_score_most() -> None:
    """Longer matches before shorter ones, and later places before earlier ones."""
    text = np.arange(300)
    text[[10, 100, 299]] = 999
    text[[99, 298]] = 998  # the last two tokens, once
    best = np.argsort(-repeated(text), kind="stable")
    assert sorted(best[:72]) == list(range(92, 164))
    assert sorted(best[72:144]) == list(range(2, 74))
    assert best[144:147].tolist() == [299, 298, 297]
    assert (repeated(np.arange(9)).argsort() == np.arange(9)).all()


@pytest.mark.parametrize(
    ("cache", "message", "hint"),
    [
        ({"contract": "readonly"}, "needs a smaller capacity", "'cache.capacities=[512]'"),
        (CACHE | {"contract": "blend"}, "contract blend", "cache.contract=readonly"),
        (CACHE | {"contract": "stateful"}, "contract stateful", "cache.contract=readonly"),
    ],
)
def test_bundles_that_it_refuses(
    tiny_engine: Callable[..., Engine], cache: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(CetaneError, match=message) as error:
        TriForce(tiny_engine(cache={"context": 160} | cache).plan)
    assert hint in (error.value.hint or "")
