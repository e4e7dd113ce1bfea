"""A llama of nine heads of which some stream, and the same model in transformers."""

from typing import Any

import numpy as np
import torch
from tests.conftest import InMemoryCheckpoint
from tests.families.parity import tokens

from cetane.engine.authored import authored_engine
from cetane.engine.engine import Engine
from cetane.planner import Planner, as_recipe_asks
from cetane.schema.recipe import Recipe, parse_recipe

LENGTH = 64
"""Tokens of a text."""
SINKS, WINDOW = 3, 20
NINE = {
    "hidden_size": 72,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_hidden_layers": 4,
}
"""The config of the llama: nine query heads in groups of three."""
SCORES = [[0.1, 0.9, 0.2], [0.8, 0.0, 0.7], [0.0, 0.1, 0.2], [0.6, 0.7, 0.8]]
"""Half of them: head 1, heads 0 and 2, none, and all."""
KEPT = {0: (1,), 1: (0, 2), 2: (), 3: (0, 1, 2)}
"""The heads of each layer that see all tokens, by these scores."""


def streaming_recipe(
    scores: list[list[float]],
    contract: str = "readonly",
    sinks: int = SINKS,
    window: int = WINDOW,
    full: float = 0.5,
    **cache: Any,
) -> Recipe:
    """`scores` are those of the heads of each layer, of which the share `full` sees all tokens."""
    source = {"source": "test", "model_type": "test", "method": "mass", "settings": {}}
    streaming = {"scores": source | {"layers": scores}, "sinks": sinks, "window": window}
    streaming["full"] = full
    content = {
        "name": "test",
        "layout": {"kind": "chunks", "chunks": 2},
        "cache": {"contract": contract, "context": LENGTH, "streaming": streaming} | cache,
        "tokens": {"verify": 4, "prefill": 16},
    }
    return parse_recipe(content, "test")


def streaming_engine(model: Any, wanted: Recipe) -> Engine:
    """The authored modules of a transformers model, whose heads stream as the recipe says."""
    plain: Any = InMemoryCheckpoint(model)
    checkpoint = as_recipe_asks(plain, wanted)
    return authored_engine(Planner(checkpoint, wanted), checkpoint)


@torch.inference_mode()
def masked(model: Any, kept: dict[int, tuple[int, ...]], sinks: int = SINKS) -> np.ndarray:
    """Logits of eager attention with a mask `(1, H, T, T)` in each layer of `kept`."""
    at = torch.arange(LENGTH)
    past = at[:, None] >= at
    near = past & ((at[:, None] - at < WINDOW) | (at < sinks))
    config, hooks = model.config, []
    group = config.num_attention_heads // config.num_key_value_heads
    for layer, heads in kept.items():
        seen = torch.stack([
            past if query // group in heads else near
            for query in range(config.num_attention_heads)
        ])  # fmt: skip
        mask = torch.where(seen, 0.0, -1e9)[None]
        hooks.append(
            model.model.layers[layer].self_attn.register_forward_pre_hook(
                lambda _, args, kwargs, mask=mask: (args, kwargs | {"attention_mask": mask}),
                with_kwargs=True,
            )
        )
    ids = torch.tensor([tokens(config.vocab_size, LENGTH)])
    logits = model(ids, use_cache=False, output_hidden_states=True).logits[0].numpy()
    for hook in hooks:
        hook.remove()
    return logits
