"""The words for parts of a mix."""

import pytest

from cetane.families import Weight
from cetane.pipeline.mixed_parts import MixedPart, described


def part(kind: str, *layers: int | None) -> MixedPart:
    places = ["" if layer is None else f"model.layers.{layer}." for layer in layers]
    weights = [Weight(f"{place}{kind}.weight", (8, 8), (8, 8), "mlp") for place in places]
    return MixedPart(tuple(weights), ())


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([part("up_proj", 3, 4)], "up_proj of layers 3 to 4"),
        ([part("up_proj", 2, 3), part("up_proj", 0, 1)], "up_proj of layers 0 to 3"),
        ([part("v_proj", 0, 1), part("v_proj", 4, 5)], "v_proj of layers 0 to 1 and 4 to 5"),
        ([part("k_proj", 7)], "k_proj of layer 7"),
        ([part("k_proj", 0, 1), part("v_proj", 0, 1)], "k_proj and v_proj of layers 0 to 1"),
        (
            [part("k_proj", 0, 1), part("v_proj", 0), part("lm_head", None)],
            "k_proj of layers 0 to 1, v_proj of layer 0, lm_head",
        ),
    ],
)
def test_words(parts: list[MixedPart], words: str) -> None:
    assert described(parts) == words
