"""Recipes for the tests of families: one for any model, and strategies that draw some."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from hypothesis import strategies as st
from tests.families.parity import CONTEXT

from cetane.schema.recipe import Recipe, parse_recipe
from cetane.schema.slots import CONTRACTS
from cetane.schema.subset import as_ranges

DECODE = ("decode", "verify")
"""The modes that run only chosen experts."""


def recipe(
    contract: str = "readonly",
    kind: str = "per-block",
    order: str = "c1t",
    slices: int = 1,
    routed: Iterable[str] = (),
    family: dict[str, Any] | None = None,
    **tokens: Any,
) -> Recipe:
    """Calls of 1, 4 and 8 tokens, unless `tokens` has others. `kind` is the layout's."""
    content = {
        "name": "test",
        "family": family or {},
        "tensor_layout": order,
        "layout": {"kind": kind, "routed": list(routed)},
        "cache": {"contract": contract, "context": CONTEXT},
        "tokens": {"verify": 4, "prefill": 8} | tokens,
        "head": {"slices": slices},
    }
    return parse_recipe(content, "test")


recipes = st.builds(
    recipe,
    contract=st.sampled_from(list(CONTRACTS)),
    kind=st.sampled_from(["single", "chunks", "per-block"]),
    order=st.sampled_from(["c1t", "ct1"]),
    slices=st.integers(1, 10),
    verify=st.none() | st.integers(2, 6),
    prefill=st.none() | st.integers(2, 32),
)
"""For models without experts."""
mixture_recipes = st.builds(
    recipe,
    contract=st.sampled_from(list(CONTRACTS)),
    kind=st.sampled_from(["per-block", "per-layer", "single"]),
    order=st.sampled_from(["c1t", "ct1"]),
    slices=st.integers(1, 3),
    family=st.builds(lambda together: {"together": together}, st.integers(1, 9)),
)
"""For models with experts, any number of which make one function. All experts run."""


def with_routes(made: Recipe) -> Recipe:
    """The recipe, where decoding and verifying run only chosen experts."""
    layout = made.layout.model_copy(update={"routed": DECODE})
    return made.model_copy(update={"layout": layout})


def subset_recipe(ids: Any, vocab: int, **head: Any) -> Recipe:
    """A head for the tokens `ids` of a vocabulary of `vocab`."""
    subset = {
        "vocabulary": vocab, "tokens": as_ranges(np.asarray(ids)), "tokenizer": "0" * 64,
        "texts": [], "held_out": [],
    }  # fmt: skip
    return parse_recipe(
        {
            "name": "test",
            "layout": {"kind": "per-block"},
            "cache": {"context": 64},
            "tokens": {"verify": 4, "prefill": 8},
            "head": {"subset": subset} | head,
        },
        "test",
    )


def int8_recipe(form: str = "int8", context: int = 32, **others: Any) -> Recipe:
    """Caches of the format `form`, for a system that can keep them in 8 bits."""
    cache = {"context": context, "format": form} | others.pop("cache", {})
    content = {
        "name": "test",
        "cache": cache,
        "tokens": {"verify": 4, "prefill": 8},
        "target": {"deployment": "iOS26"},
    }
    return parse_recipe(content | others, "test")
