"""Gemma 2, 3, 3n and 4 equal transformers in fp32, past their windows, however a text is fed."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.families import gemma_models
from tests.families.gemma_models import (
    FEEDS,
    build_gemma2,
    build_gemma3,
    build_gemma3n,
    build_gemma4,
    build_gemma4_unified,
    build_vaultgemma,
)
from tests.families.parity import assert_parity

from cetane.schema.recipe import Recipe

QUICKLY = settings(max_examples=12, derandomize=True, phases=[Phase.generate])


def recipe_for(config: dict[str, Any], data: st.DataObject) -> Recipe:
    """Any; but where no layer has a window, a recipe may not speak of them."""
    wanted = data.draw(gemma_models.recipes(config["num_hidden_layers"]))
    if gemma_models.SLIDING in config["layer_types"]:
        return wanted
    return wanted.model_copy(update={"cache": wanted.cache.model_copy(update={"sliding": None})})


@pytest.mark.parametrize("build", [build_gemma2, build_vaultgemma])
@QUICKLY
@given(data=st.data())
def test_gemma2(build: Callable[..., Any], data: st.DataObject) -> None:
    """Any way of attention bounds the scores before it hides keys, in blocks too."""
    config = data.draw(gemma_models.gemma2_configs())
    wanted = recipe_for(config, data)
    scale = data.draw(st.sampled_from([1.0, 2.0**-5]))
    family = wanted.family | {"residual_scale": scale}
    assert_parity(build(**config), wanted.model_copy(update={"family": family}), FEEDS)


@QUICKLY
@given(st.data())
def test_gemma3(data: st.DataObject) -> None:
    """With any residual scale: what reads the stream is normed first."""
    config = data.draw(gemma_models.gemma3_configs())
    wanted = recipe_for(config, data)
    scale = data.draw(st.sampled_from([1.0, 1.0, 0.5, 2.0**-5]))
    family = wanted.family | {"residual_scale": scale}
    assert_parity(build_gemma3(**config), wanted.model_copy(update={"family": family}), FEEDS)


@QUICKLY
@given(st.data())
def test_gemma3n(data: st.DataObject) -> None:
    config = data.draw(gemma_models.gemma3n_configs())
    wanted = recipe_for(config, data)
    scale = data.draw(st.sampled_from([1.0, 0.5, 2.0**-5]))
    family = wanted.family | {"residual_scale": scale}
    assert_parity(build_gemma3n(**config), wanted.model_copy(update={"family": family}), FEEDS)


@QUICKLY
@given(st.data())
def test_gemma4(data: st.DataObject) -> None:
    config = data.draw(gemma_models.gemma4_configs())
    wanted = recipe_for(config, data)
    scale = data.draw(st.sampled_from([1.0, 0.5, 2.0**-5]))
    family = wanted.family | {"residual_scale": scale}
    assert_parity(build_gemma4(**config), wanted.model_copy(update={"family": family}), FEEDS)


@QUICKLY
@given(st.data())
def test_gemma4_unified(data: st.DataObject) -> None:
    config = data.draw(gemma_models.gemma4_configs())
    wanted = recipe_for(config, data)
    assert_parity(build_gemma4_unified(**config), wanted, FEEDS)
