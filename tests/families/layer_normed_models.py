"""Small random models whose norms are LayerNorms."""

from typing import Any

from tests.conftest import build_model
from tests.families.config_parts import ROPES

LAYER_NORMED = (
    "cohere", "cohere2", "falcon", "gpt_neox", "jais2", "nemotron", "olmo", "persimmon", "phi",
    "stablelm", "starcoder2",
)  # fmt: skip
"""Their model types."""
IN_PART = ("gpt_neox", "nemotron", "persimmon", "phi", "stablelm")
"""The model types that turn only some channels of a head."""
HALF = ROPES["default"] | {"partial_rotary_factor": 0.5}


def build_layer_normed(kind: str, **config: Any) -> Any:
    """A random model; half of each head turns where a part may."""
    rope = HALF if kind in IN_PART else ROPES["default"]
    return build_model(kind, **({"rope_parameters": rope} | config))
