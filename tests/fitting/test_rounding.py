"""Layers rounded while a model runs: by the inputs that rounded layers make."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cetane.compress import parse_format, second_order
from cetane.compress.selection import SecondOrder
from cetane.errors import CetaneError
from cetane.files import silent
from cetane.fitting.bfloat16 import bfloat16_products
from cetane.fitting.rounding import Rounder, encode
from cetane.gates.resemblance import arrays, too_far

FORM = parse_format("palette3-kmeans-group8")


def linears(model: Any) -> dict[str, nn.Linear]:
    return {p: m for p, m in model.named_modules() if isinstance(m, nn.Linear) and p != "lm_head"}


def inputs_of(model: Any, path: str, tokens: Tensor) -> Tensor:
    """What a layer is given when the model runs as it is, with the products of the pass."""
    seen: list[Tensor] = []
    layer = model.get_submodule(path)
    hook = layer.register_forward_pre_hook(lambda _, given: seen.append(given[0].float()))
    with torch.inference_mode(), bfloat16_products(model):
        model(tokens)
    hook.remove()
    return seen[0].flatten(0, -2)


Rounded = tuple[Any, dict[str, Tensor], Rounder, Tensor]
"""The model after rounding, its weights before, what rounded it, and the tokens."""


@pytest.fixture(scope="module")
def rounded(tiny_model: Callable[..., Any]) -> Rounded:
    model = tiny_model("llama")
    before = {path: layer.weight.clone() for path, layer in linears(model).items()}
    tokens = torch.randint(0, 288, (4, 24), generator=torch.Generator().manual_seed(0))
    rounder = Rounder({f"{path}.weight": FORM for path in before}, "gptq", silent)
    rounder.run(model, {path: f"{path}.weight" for path in [*before, "lm_head"]}, tokens)
    return model, before, rounder, tokens


def test_the_model_computes_with_its_constants(rounded: Any) -> None:
    model, before, rounder, _ = rounded
    assert rounder.constants.keys() == {f"{path}.weight" for path in before}
    for path, layer in linears(model).items():
        decoded = rounder.constants[f"{path}.weight"].decode()
        np.testing.assert_array_equal(layer.weight.detach().numpy(), decoded.astype(np.float32))


@pytest.mark.parametrize(
    "path", ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"]
)
def test_a_layer_is_rounded_by_the_inputs_that_rounded_layers_make(rounded: Any, path: str) -> None:
    model, before, rounder, tokens = rounded
    rows = inputs_of(model, path, tokens).numpy()
    wanted = second_order.encode(before[path].detach().numpy(), FORM, rows.T @ rows / len(rows))
    made = rounder.constants[f"{path}.weight"].decode()
    # The sums of two runs differ in their last bits, which may move a weight on the edge.
    assert np.mean(made != wanted.decode()) < 0.01


def test_weighted_looks_at_mean_squares_alone(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("llama")
    path = "model.layers.0.mlp.gate_proj"
    weight = model.get_submodule(path).weight.detach().clone().numpy()
    tokens = torch.randint(0, 288, (2, 16), generator=torch.Generator().manual_seed(1))
    rows = inputs_of(model, path, tokens).numpy()
    rounder = Rounder({f"{path}.weight": FORM}, "weighted", silent)
    rounder.run(model, {path: f"{path}.weight"}, tokens)
    own = rounder.constants[f"{path}.weight"].decode().astype(np.float32)
    squares = np.square(rows).mean(0)

    def cost(values: np.ndarray) -> float:
        return float((np.square(values.astype(np.float32) - weight) * squares).sum())

    plain = parse_format("palette3-weighted-group8").encode(weight, squares[None]).decode()
    assert cost(own) <= cost(plain) * 1.01


def test_a_head_that_is_rounded_sees_every_token(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("llama", tie_word_embeddings=False)
    tokens = torch.randint(0, 288, (2, 16), generator=torch.Generator().manual_seed(2))
    rounder = Rounder({"lm_head.weight": FORM}, "gptq", silent)
    rounder.run(model, {"lm_head": "lm_head.weight"}, tokens)
    assert rounder.constants.keys() == {"lm_head.weight"}


def test_what_goes_too_far_is_rounded_with_more_damping() -> None:
    """Inputs of fewer dimensions than they have channels leave the weight free."""
    draw = np.random.default_rng(0)
    weight = draw.normal(size=(32, 32)).astype(np.float32)
    inputs = draw.normal(size=(256, 16)) @ draw.normal(size=(16, 32))
    hessian = (inputs.T @ inputs / 256).astype(np.float32)
    loose = SecondOrder(damping=1e-4)
    before = second_order.encode(weight, FORM, hessian, None, loose)
    assert too_far(arrays(before), weight, FORM) is not None
    made = encode(weight, FORM, hessian, None, loose)
    assert too_far(arrays(made), weight, FORM) is None


def test_what_cannot_be_inverted_is_rounded_with_more_damping() -> None:
    """Without any damping of weight, inputs of one dimension have no inverse."""
    weight = np.random.default_rng(1).normal(size=(16, 32)).astype(np.float32)
    hessian = np.ones((32, 32), np.float32)
    with pytest.raises(RuntimeError, match="cholesky"):
        second_order.encode(weight, FORM, hessian, None, SecondOrder(damping=1e-12))
    made = encode(weight, FORM, hessian, None, SecondOrder(damping=1e-12))
    assert too_far(arrays(made), weight, FORM) is None


def test_damaged_weights_are_named(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("llama").requires_grad_(False)
    paths = {path: f"{path}.weight" for path in linears(model)}
    broken = next(iter(paths))
    model.get_submodule(broken).weight[0, 0] = float("nan")
    rounder = Rounder(dict.fromkeys(paths.values(), FORM), "gptq", silent)
    with pytest.raises(CetaneError, match=f"{broken}.weight holds NaN or infinity"):
        rounder.run(model, paths | {"lm_head": "lm_head.weight"}, torch.ones(1, 8).long())
