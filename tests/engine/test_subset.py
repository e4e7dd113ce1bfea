"""A head for some tokens: their logits are those of the whole head, no other is ever chosen."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import build_model
from tests.families.gemma_models import build_gemma3, build_gemma4
from tests.families.parity import engine_of, run, truth
from tests.families.recipes import subset_recipe
from tests.families.zaya_models import build_zaya

from cetane.engine.generate import generate
from cetane.engine.sampling import Sampler
from cetane.errors import CetaneError
from cetane.schema.recipe import Recipe
from cetane.speculate.ngram import Ngram
from cetane.speculate.speculator import Speculator

MODELS = {
    "llama": build_model, "gemma3": build_gemma3, "gemma4": build_gemma4, "zaya": build_zaya,
}  # fmt: skip
FEEDS = {"prefill": [32], "steps of 4": [4] * 8, "uneven": [5, 1, 11, 2, 4, 3, 6]}


def some(vocab: int) -> np.ndarray:
    """The first and the last token, a run, and every third."""
    return np.array(sorted({0, *range(40, 60), *range(0, vocab, 3), vocab - 1}))


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("slices", [1, 3])
def test_the_logits_of_its_tokens(family: str, slices: int) -> None:
    model = MODELS[family]()
    vocab = model.config.vocab_size
    ids, expected = some(vocab), truth(model)
    engine = engine_of(model, subset_recipe(ids, vocab, slices=slices))
    absent = np.setdiff1d(np.arange(vocab), ids)
    assert sum(s.blocks[0].startswith("head") for s in engine.plan.shards) == slices
    for pieces in FEEDS.values():
        found = run(engine, pieces)
        assert np.abs(found[:, ids] - expected[:, ids]).max() < 1e-4
        assert (found[:, absent] == -np.inf).all()


@pytest.mark.parametrize("slices", [1, 3])
def test_a_head_that_chooses(slices: int) -> None:
    model = build_gemma4()
    ids, expected = some(288), truth(model)
    engine = engine_of(model, subset_recipe(ids, 288, slices=slices, choose=True))
    found = run(engine, [32])
    assert (found.argmax(1) == ids[expected[:, ids].argmax(1)]).all()
    assert np.abs(found.max(1) - expected[:, ids].max(1)).max() < 1e-4


def test_all_tokens_are_a_subset_too() -> None:
    model = build_model()
    engine = engine_of(model, subset_recipe(range(288), 288, slices=2))
    assert np.abs(run(engine, [32]) - truth(model)).max() < 1e-4


@given(st.floats(0, 1e30), st.integers(0, 2**32))
def test_no_sampling_takes_another(temperature: float, seed: int) -> None:
    logits = np.full(50, -np.inf, np.float32)
    logits[[3, 20, 49]] = [1, -5, 0]
    for filters in ({}, {"top_k": 40}, {"top_p": 0.999999}, {"min_p": 1e-9}):
        assert Sampler(temperature, seed=seed, **filters)(logits) in (3, 20, 49)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_drafts(temperature: float) -> None:
    """They change nothing, and are cut where the head lacks a token: a prompt may hold any."""
    model, ids = build_model(), some(288)
    engine = engine_of(model, subset_recipe(ids, 288))
    prompt = [1, 2, 7, 40, 41, 42, 1, 2, 7, 40, 41]

    def answer(speculator: Speculator | None) -> list[int]:
        sampler = Sampler(temperature, seed=3)
        return list(generate(engine.session(), prompt, sampler, 40, drafts=speculator))

    speculator = Speculator([Ngram(1, 3)], 3)
    said = answer(speculator)
    assert said == answer(None)
    assert set(said) <= set(ids.tolist())
    assert speculator.counters.drafted > 0
    speculator.begin(engine.session(), prompt)
    drafted = speculator.draft([42], 3).tokens
    assert drafted == (1,)[: int(1 in ids)]


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (subset_recipe([0, 5], 300), "for 300 tokens, but a tiny llama has 288"),
        (subset_recipe([0, 5], 288, slices=3), "the head has only 2 rows"),
    ],
)
def test_what_does_not_fit(recipe: Recipe, message: str) -> None:
    with pytest.raises(CetaneError, match=message):
        engine_of(build_model(), recipe)


def test_a_plan_with_another_subset_is_refused() -> None:
    """A manifest may have been changed."""
    plan = engine_of(build_model(), subset_recipe([0, 5, 6], 288)).plan
    content = plan.model_dump(mode="json")
    for tokens in ("0 5", "0 5-7"):
        content["recipe"]["head"]["subset"]["tokens"] = tokens
        with pytest.raises(ValueError, match=r"3 logits|cover"):
            type(plan).model_validate(content)
    content["recipe"]["head"]["subset"] |= {"tokens": "0 5 6", "vocabulary": 289}
    with pytest.raises(ValueError, match="a subset of 289 tokens, but a model of 288"):
        type(plan).model_validate(content)
