"""Answers that a model writes itself, in its own chat format: what its draft heads learn from."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Any

import torch
from torch import Tensor

from cetane.checkpoint import Tokenizer
from cetane.fitting.teacher import has_bfloat16
from cetane.gates.probes import asked

BATCH, LENGTH = 64, 160
"""Answers that are written side by side, and the most tokens of each."""


def questions() -> list[str]:
    """All questions, in an order that does not change."""
    path = resources.files("cetane") / "data/prompts/questions.toml"
    groups = tomllib.loads(path.read_text(encoding="utf-8")).values()
    made = [template.format(subject) for group in groups
            for template in group["templates"] for subject in group["subjects"]]  # fmt: skip
    random.Random(0).shuffle(made)
    return made


def write_answers(
    model: Any, tokenizer: Tokenizer, questions: Sequence[str], batch: int = BATCH
) -> Iterator[list[str]]:
    """Questions with a causal transformers model's greedy answers, as texts, a batch at a time.

    An answer whose tokens its text does not give back is left out. The model computes in bf16
    from then on, where the processor has such products.
    """
    if has_bfloat16():
        model.bfloat16()
    model.set_attn_implementation("sdpa")
    for start in range(0, len(questions), batch):
        prompts = [asked(tokenizer, question) for question in questions[start : start + batch]]
        written = greedy(model, prompts, LENGTH, tokenizer.eos_ids)
        texts = {tokenizer.decode(ids, skip_special_tokens=False): ids for ids in written}
        yield [text for text, ids in texts.items() if tokenizer.encode(text) == ids]


@torch.inference_mode()
def greedy(
    model: Any, prompts: Sequence[Sequence[int]], count: int, stop: Sequence[int]
) -> list[list[int]]:
    """Prompts of unequal lengths with their greedy continuations, at most `count` tokens each. An
    answer that is complete leaves the batch."""
    from transformers import DynamicCache

    longest = max(map(len, prompts))
    tokens = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    texts = [list(p) for p in prompts]
    rows, cache = torch.arange(len(prompts)), DynamicCache(config=model.config)
    ends = torch.tensor(list(stop))
    for _ in range(count):
        places = (mask.cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        states = model.model(
            input_ids=tokens, attention_mask=mask, position_ids=places, past_key_values=cache,
            use_cache=True,
        ).last_hidden_state  # fmt: skip
        # a slice of a wide batch would copy the head's weights for each row
        chosen: Tensor = model.lm_head(states[:, -1]).argmax(-1)
        for row, token in zip(rows.tolist(), chosen.tolist(), strict=True):
            texts[row].append(token)
        going = (~torch.isin(chosen, ends)).nonzero()[:, 0]
        if not len(going):
            break
        if len(going) < len(rows):
            cache.batch_select_indices(going)
            rows, mask, chosen = rows[going], mask[going], chosen[going]
        tokens, mask = chosen[:, None], torch.cat([mask, mask.new_ones(len(rows), 1)], 1)
    return texts
