"""Matrices whose rows a family takes in another order, or of which it takes some, are fitted."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import InMemoryCheckpoint, build_model
from tests.families.latent_models import DEEPSEEK
from tests.families.matrix_models import GRANITE_HYBRIDS, QWEN_NEXT
from tests.families.mixture_models import LLAMA4
from tests.fitting.test_rounding import inputs_of

from cetane.compress import parse_format, second_order
from cetane.files import silent
from cetane.fitting.fit import fitted_formats, fitted_parts
from cetane.fitting.importance import Importance
from cetane.fitting.rounding import Rounder
from cetane.gates.resemblance import arrays, too_far
from cetane.gates.transformers_model import stored_names
from cetane.planner import Planner
from cetane.schema.recipe import parse_recipe

FORM = parse_format("palette3-kmeans-group4")
TOKENS = torch.randint(0, 288, (8, 24), generator=torch.Generator().manual_seed(0))
UNTIED = {"tie_word_embeddings": False}
LATENT = ("kv_a_proj_with_mqa", "from_latent", "to_latent")
RANKS = {"q_lora_rank": 16, "attention_bias": True}
MODELS: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "deepseek_v2": ("deepseek_v2", DEEPSEEK, {"q_proj", *LATENT}),
    "deepseek_v2, low rank": (
        "deepseek_v2", DEEPSEEK | RANKS, {"q_b_proj", *LATENT}
    ),
    "minicpm3": (
        "minicpm3", DEEPSEEK | UNTIED, {"q_proj", *LATENT}
    ),
    "llama4": ("llama4_text", LLAMA4, {"q_proj", "k_proj"}),
    "qwen3_5": ("qwen3_5_text", QWEN_NEXT["qwen3_5_text"], {"q_proj", "gate_proj"}),
    "qwen3_next": (
        "qwen3_next", QWEN_NEXT["qwen3_next"],
        {"q_proj", "gate_proj", "in_proj_qkv", "in_proj_z"},
    ),
    "gpt2": ("gpt2", UNTIED, {"q_proj", "k_proj", "v_proj", "c_proj"}),
    "granite_hybrid": (
        "granitemoehybrid", GRANITE_HYBRIDS["dense"], {"in_proj_z", "in_proj_xbc"}
    ),
}  # fmt: skip
"""The kinds of models, their configs, and the parts that have rows in another order."""


class Case:
    """A random model, and its weights that have rows in another order."""

    def __init__(self, name: str) -> None:
        kind, config, self.wanted = MODELS[name]
        self.model = build_model(kind, **config).requires_grad_(False)
        self.model.config._experts_implementation = "eager"
        self.before = {n: t.clone() for n, t in self.model.state_dict().items()}
        recipe = parse_recipe(
            {
                "name": "rows", "cache": {"context": 32}, "layout": {"kind": "single"},
                "tokens": {"verify": 0, "prefill": 0},
                "compression": {"types": {"attention": FORM.name}},
            },
            "recipe",
        )  # fmt: skip
        planner = Planner(InMemoryCheckpoint(self.model), recipe)
        self.weights = fitted_parts(planner, fitted_formats(planner))
        self.formats = dict.fromkeys(self.weights, FORM)
        stored = stored_names(self.model, self.model.config)
        self.names = {path: own["weight"] for path, own in stored.items() if "weight" in own}

    def rounded(self) -> Rounder:
        rounder = Rounder(self.formats, "gptq", silent, parts=self.weights.values())
        rounder.run(self.model, self.names, TOKENS)
        return rounder


@pytest.mark.parametrize("name", MODELS)
def test_the_model_computes_with_its_constants(name: str) -> None:
    """A family reads from the rounded model what the constants decode to."""
    case = Case(name)
    assert {weight.part for weight in case.weights.values()} == case.wanted
    made = case.rounded().constants
    assert made.keys() == case.weights.keys()
    before, after = (InMemoryCheckpoint(case.model) for _ in range(2))
    before.tensors = case.before
    for matrix, weight in case.weights.items():
        decoded = made[matrix].decode().astype(np.float32)
        np.testing.assert_array_equal(weight.read(after).flatten(1), decoded)
        values = weight.read(before).flatten(1).numpy()
        assert too_far(arrays(made[matrix]), values, FORM) is None
    others = {n for n in case.before if not torch.equal(after.tensors[n], case.before[n])}
    assert others == {weight.name for weight in case.weights.values()}, "and nothing else changes"


@pytest.mark.parametrize("name", MODELS)
def test_they_are_rounded_by_what_their_matrix_reads(name: str) -> None:
    case = Case(name)
    made, stored = case.rounded().constants, InMemoryCheckpoint(case.model)
    stored.tensors = case.before
    picked = {weight.name for weight in case.weights.values()}
    for path, name in case.names.items():
        if name not in picked:
            continue
        rows = inputs_of(case.model, path, TOKENS).numpy()
        for matrix, weight in case.weights.items():
            if weight.name == name and weight.part != "to_latent":
                values = weight.read(stored).flatten(1).numpy()
                wanted = second_order.encode(values, FORM, rows.T @ rows / len(rows))
                # as in test_rounding.py, sums differ in their last bits
                assert np.mean(made[matrix].decode() != wanted.decode()) < 0.01, path


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v2, low rank", "minicpm3"])
def test_heads_that_the_port_transposes_are_rounded_one_by_one(name: str) -> None:
    """By what the checkpoint's matrix reads, so the keys err less than those of plain rounding."""
    case = Case(name)
    path = "model.layers.1.self_attn.kv_b_proj"
    keys = case.before[f"{path}.weight"].unflatten(0, (4, 22))[:, :12].numpy()
    made = case.rounded().constants[f"{path}.weight.to_latent"].decode().reshape(4, 20, 12)
    rows, errors = inputs_of(case.model, path, TOKENS).numpy(), np.zeros(2)
    for head, own in zip(keys, made, strict=True):
        given = np.eye(12, dtype=np.float32), rows.T @ rows / len(rows)
        wanted = second_order.encode(head.T, FORM, *given).decode()
        assert np.mean(own != wanted) < 0.01
        plain = FORM.encode(np.ascontiguousarray(head.T)).decode()
        errors += [
            np.square(rows @ (one.astype(np.float32) - head.T)).sum() for one in (own, plain)
        ]
    assert errors[0] < 0.9 * errors[1]


def test_importance_of_rows_counts_their_own_errors() -> None:
    """The harm of errors in some rows is that of the whole matrix with errors there alone."""
    draw = torch.Generator().manual_seed(0)
    gradients = torch.randn(40, 6, generator=draw)
    whole = Importance(torch.ones(40), gradients.T @ gradients / 40, 0.3)
    rows = torch.tensor([4, 1, 5])
    off, inputs = np.zeros((6, 3), np.float32), torch.randn(40, 3, generator=draw)
    off[rows] = torch.randn(3, 3, generator=draw).numpy()
    products = whole.products(inputs)
    assert whole.of_rows(rows).harm(off[rows], products) == pytest.approx(whole.harm(off, products))
    alone = replace(whole, outputs=None)
    assert alone.of_rows(rows).harm(off[rows], products) == pytest.approx(alone.harm(off, products))
