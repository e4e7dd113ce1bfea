"""Small random models whose scores fall with distance."""

from typing import Any

from tests.conftest import build_model


def build_alibi(kind: str, **config: Any) -> Any:
    """A model of a type whose heads each have keys of their own: 16, with slopes that fp16
    rounds, unless `config` has another number."""
    heads = config.get("num_attention_heads", 16)
    own = {"num_attention_heads": heads, "num_key_value_heads": heads}
    return build_model(kind, **own | config)
