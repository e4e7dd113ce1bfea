"""What errors of a layer change, against derivatives that torch takes of the loss itself."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cetane.files import silent
from cetane.fitting import importance as module
from cetane.fitting.importance import EVEN, Collector, importance

PATH = "model.layers.1.mlp.up_proj"


def text() -> Tensor:
    return torch.randint(0, 288, (6, 16), generator=torch.Generator().manual_seed(0))


def collected(model: Any) -> list[Collector]:
    return [Collector("w", model.get_submodule(PATH))]


def gradients(model: Any, tokens: Tensor) -> Tensor:
    """Of the sum of all losses, by what is added to a layer's output, `(B, T, O)`."""
    layer = model.get_submodule(PATH)
    added = torch.zeros(*tokens.shape, layer.out_features, requires_grad=True)
    hook = layer.register_forward_hook(lambda _, given, made: made + added)
    logits = model(tokens).logits
    hook.remove()
    logs = torch.log_softmax(logits[:, :-1], -1)
    (-logs.gather(2, tokens[:, 1:, None]).sum()).backward()
    assert added.grad is not None
    return added.grad


def test_factors_are_products_of_gradients(
    tiny_model: Callable[..., Any], monkeypatch: Any
) -> None:
    monkeypatch.setattr(module, "ROWS", 32)  # three passes
    model = tiny_model("llama").requires_grad_(False)
    own = importance(model, collected(model), text(), silent)["w"]
    rows = gradients(model, text()).flatten(0, 1)
    wanted = rows.T @ rows
    assert own.outputs is not None
    # bfloat16 products, where the processor has them
    close = {"rtol": 0.1, "atol": 0.05}
    torch.testing.assert_close(own.outputs, wanted / wanted.diagonal().mean(), **close)
    squares = rows.square().sum(1)
    torch.testing.assert_close(own.tokens, EVEN + (1 - EVEN) * squares / squares.mean(), **close)
    assert not any(parameter.grad is not None for parameter in model.parameters())
    assert not model.get_submodule(PATH)._forward_hooks


@pytest.mark.parametrize("kind", ["llama", "granite", "gemma2"])
def test_the_loss_is_that_of_the_models_own_logits(
    tiny_model: Callable[..., Any], kind: str
) -> None:
    """Granite divides its logits, and Gemma 2 has a bound for them."""
    bound = {"gemma2": {"final_logit_softcapping": 1.5}, "granite": {"logits_scaling": 3.0}}
    model, tokens = tiny_model(kind, **bound.get(kind, {})).requires_grad_(False), text()
    logs = torch.log_softmax(model(tokens).logits[:, :-1], -1)
    wanted = -logs.gather(2, tokens[:, 1:, None]).sum()
    torch.testing.assert_close(module.loss_of(model, tokens), wanted)


def test_inputs_count_as_their_tokens_do(tiny_model: Callable[..., Any]) -> None:
    own = module.Importance(torch.tensor([2.0, 0.0, 1.0]), None, 1.0)
    inputs = torch.tensor([[1.0, 0.0], [5.0, 5.0], [0.0, 3.0]])
    np.testing.assert_allclose(own.products(inputs), np.array([[2.0, 0.0], [0.0, 9.0]]) / 3)
    routed = inputs[:2]  # not one row for every token: all count alike
    np.testing.assert_allclose(own.products(routed), (routed.T @ routed / 2).numpy())


def test_of_very_many_outputs_no_products_are_kept(
    tiny_model: Callable[..., Any], monkeypatch: Any
) -> None:
    monkeypatch.setattr(module, "LARGEST", 8)
    model = tiny_model("llama").requires_grad_(False)
    own = importance(model, collected(model), text(), silent)["w"]
    assert own.outputs is None and len(own.tokens) == 96


def test_predicted_harm_is_what_gradients_say(tiny_model: Callable[..., Any]) -> None:
    """Half the mean square of what an error changes, where the factors are the whole truth."""
    model = tiny_model("llama").requires_grad_(False)
    own = importance(model, collected(model), text(), silent)["w"]
    rows = gradients(model, text()).flatten(0, 1).double().numpy()
    random = np.random.default_rng(0)
    off = random.normal(0, 0.1, (rows.shape[1], 4)).astype(np.float32)
    inputs = random.normal(size=(5, 4))
    products = inputs.T @ inputs / 5
    changes = np.einsum("no,oi,mi->nm", rows, off, inputs)
    harm = own.harm(off, products.astype(np.float32))
    np.testing.assert_allclose(harm, np.square(changes).mean() / 2, rtol=0.1)


def test_importance_is_kept_and_found(tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    model = tiny_model("llama").requires_grad_(False)
    made = importance(model, collected(model), text(), silent)
    path = tmp_path / "folder" / "kept"
    assert module.load_importance(path) is None
    module.keep_importance(path, text(), made)
    found = module.load_importance(path)
    assert found is not None
    assert torch.equal(found[0], text())
    torch.testing.assert_close(found[1]["w"].tokens, made["w"].tokens)
    torch.testing.assert_close(found[1]["w"].outputs, made["w"].outputs)
    assert found[1]["w"].scale == pytest.approx(made["w"].scale)
    path.write_bytes(b"something else")
    assert module.load_importance(path) is None


def test_importance_that_changed_is_not_read(
    tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    model, path = tiny_model("llama").requires_grad_(False), tmp_path / "kept"
    made = importance(model, collected(model), text(), silent)
    module.keep_importance(path, text(), made)
    known = module.load_importance(path)
    assert known is not None and torch.equal(known[0], text())
    assert known[1]["w"].scale == made["w"].scale
    assert torch.equal(known[1]["w"].tokens, made["w"].tokens)
    tensors = load_file(path)
    for name, wrong in (
        (module.TEXT, torch.zeros_like(text())), (module.TEXT, text().flatten()),
        (f"w{module.OUTPUTS}", torch.ones(1, 1)), (f"w{module.SCALE}", torch.tensor([torch.nan])),
    ):  # fmt: skip
        save_file(tensors | {name: wrong}, path)
        assert module.load_importance(path) is None
