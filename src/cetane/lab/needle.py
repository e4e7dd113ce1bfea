"""Recall of a needle by its distance, for every form of attention in full layers.

The model is made by hand: one full layer of Gemma 4. At the question, it searches for a needle by
content, in channels that no rotation touches, and answers with the needle.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from cetane.engine.authored import authored_engine
from cetane.errors import CetaneError
from cetane.planner import Planner
from cetane.schema.recipe import parse_recipe

FILLER, NEEDLE, QUESTION = 0, 20, 40
"""The first token of each kind. There is only one question."""
NEEDLES = 12
LONGEST = 8192
"""The longest context in which a needle is hidden, in tokens."""
CONFIG: dict[str, Any] = {
    "model_type": "gemma4_text", "vocab_size": 48, "vocab_size_per_layer_input": 48,
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
    "layer_types": ["full_attention"], "num_attention_heads": 1, "num_key_value_heads": 1,
    "head_dim": 16, "global_head_dim": 32, "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0, "sliding_window": 32, "final_logit_softcapping": None,
    "max_position_embeddings": LONGEST, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": 0,
}  # fmt: skip


class Seeker:
    """The model as a checkpoint.

    Tokens are channels: filler 0, any needle 1 and one from 16 up, the question 2. Attention heads
    have 32 channels; 4 pairs turn, and 8 to 11 do not.
    """

    source = "a model made by hand"

    def __init__(self) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**CONFIG), attn_implementation="eager", dtype=torch.float32
        ).eval()
        with torch.no_grad():
            fill(model)
        self.model = model
        self.config: dict[str, Any] = model.config.to_dict()
        self.tensors: dict[str, Tensor] = dict(model.state_dict())
        del self.tensors["lm_head.weight"]  # tied

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def names(self) -> list[str]:
        return sorted(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def read(self, name: str) -> Tensor:
        return self.tensors[name].clone()

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        return self.tensors[name][start:stop].clone()


def fill(model: Any) -> None:
    """Fill the weights with zeros, but for those that find the needle."""
    layer, table = model.model.layers[0], model.model.embed_tokens.weight
    for parameter in model.parameters():
        parameter.zero_()
    table[:NEEDLE, 0] = 1
    for index in range(NEEDLES):
        table[NEEDLE + index, [1, 16 + index]] = 1
    table[QUESTION, 2] = 1
    attention = layer.self_attn
    attention.q_proj.weight[8, 2] = attention.k_proj.weight[8, 1] = 1
    attention.q_proj.weight[9, 0] = attention.k_proj.weight[10, 0] = 1
    attention.k_proj.weight[11, 2] = 1
    attention.v_proj.weight[range(NEEDLES), range(16, 16 + NEEDLES)] = 1
    attention.o_proj.weight[range(16, 16 + NEEDLES), range(NEEDLES)] = 1
    for norm in (layer.input_layernorm, attention.q_norm, attention.k_norm, model.model.norm):
        norm.weight.fill_(1)
    layer.post_attention_layernorm.weight.fill_(4)
    layer.layer_scalar.fill_(1)


def distances(window: int, context: int) -> list[int]:
    """Tokens from the question back to the needle: dense around the end of a window, which holds
    the question and `window - 1` tokens before it. The last is the first token of the text.

    CetaneError for a window that leaves no token outside."""
    if window >= context:
        raise CetaneError(
            f"a window of {window} tokens sees all of {context}: no needle is outside",
            "give the workload a larger context",
        )
    near = {1, window // 8, window // 2, window - 2, window - 1}
    far = {window, window + 1, (3 * window + context) // 4, (window + context) // 2, context - 1}
    return sorted(d for d in near | far if 0 < d < context)


def text(distance: int, needle: int, length: int) -> list[int]:
    """A text of `length` tokens that ends with the question."""
    last = length - 1
    tokens = np.random.default_rng(distance).integers(FILLER, NEEDLE, last).tolist()
    tokens[last - distance] = NEEDLE + needle
    return [*tokens, QUESTION]


def recall(family: dict[str, Any], contract: str, context: int, window: int) -> dict[int, float]:
    """The share of needles found, by distance in tokens, in texts that fill the context.

    `family` has options of a recipe's `[family]`. `window` is a number of tokens: needles lie
    around its end. Raises CetaneError for a context above `LONGEST`, and for a window that fills
    the context.
    """
    if context > LONGEST:
        raise CetaneError(
            f"needles are hidden in at most {LONGEST} tokens, not {context}",
            "give the workload a smaller context",
        )
    seeker = Seeker()
    recipe = parse_recipe(
        {
            "name": "needle",
            "family": family,
            "layout": {"kind": "single"},
            "cache": {"contract": contract, "context": context},
            "tokens": {"verify": 4, "prefill": max(8, context // 32)},
        },
        "needle",
    )
    engine = authored_engine(Planner(seeker, recipe), seeker)
    shares = {}
    for distance in distances(window, context):
        needles = (0, 5, 11)
        texts = [text(distance, needle, context) for needle in needles]
        answers = [engine.session().feed(tokens) for tokens in texts]
        chosen = [int(np.argmax(logits)) - NEEDLE for logits in answers if logits is not None]
        shares[distance] = float(np.mean(np.array(chosen) == needles))
    return shares
