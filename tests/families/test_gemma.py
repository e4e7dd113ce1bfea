"""Gemma 3 and 4 equal transformers in fp32, past their windows, however a text is fed."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.families import gemma_models
from tests.families.gemma_models import FEEDS, build_gemma3, build_gemma4
from tests.families.parity import assert_parity


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.data())
def test_gemma3(data: st.DataObject) -> None:
    config = data.draw(gemma_models.gemma3_configs())
    wanted = data.draw(gemma_models.recipes(config["num_hidden_layers"]))
    if no_window(config):
        wanted = wanted.model_copy(
            update={"cache": wanted.cache.model_copy(update={"sliding": None})}
        )
    assert_parity(build_gemma3(**config), wanted, FEEDS)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.data())
def test_gemma4(data: st.DataObject) -> None:
    config = data.draw(gemma_models.gemma4_configs())
    wanted = data.draw(gemma_models.recipes(config["num_hidden_layers"]))
    if no_window(config):
        wanted = wanted.model_copy(
            update={"cache": wanted.cache.model_copy(update={"sliding": None})}
        )
    assert_parity(build_gemma4(**config), wanted, FEEDS)


def no_window(config: dict[str, Any]) -> bool:
    """No layer has a window, so that a recipe may not speak of them."""
    return gemma_models.SLIDING not in config["layer_types"]
