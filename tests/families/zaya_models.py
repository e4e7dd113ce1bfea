"""Tiny random ZAYAs in which every parameter matters and every expert is chosen."""

from typing import Any

import torch
from tests.conftest import build_model
from tests.families.parity import tokens

TINY: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 101,
    "moe_intermediate_size": 12,
    "num_experts": 4,
    "router_hidden_size": 10,
    "layer_types": ["hybrid", "hybrid_sliding", "hybrid"],
    "sliding_window": 7,
}
ALL = ("decode", "verify", "prefill")


def build_zaya(**config: Any) -> Any:
    """A random model whose routers send the tokens of `tests.families.parity` everywhere.

    transformers' own balancing biases keep tokens from skipping the experts; these do not.
    """
    model = build_model("zaya", **(TINY | config))
    model.config._experts_implementation = "eager"  # the default's matrices have aligned widths
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("temp"):
                parameter.uniform_(0.5, 2.5)
            elif "router_mlp" in name and parameter.ndim == 2:
                parameter.mul_(8)
            elif name.endswith(("_scale", "_bias")):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    hooks = [router.router_mlp.register_forward_hook(balance(router)) for router in routers(model)]
    with torch.no_grad():
        model(torch.tensor([tokens(model.config.vocab_size)]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return model


def routers(model: Any) -> list[Any]:
    return [layer.mlp.gate for layer in model.model.layers]


def balance(router: Any) -> Any:
    """A hook that finds biases with which many classes are chosen, and no token is near a tie."""

    def hook(module: Any, args: Any, logits: torch.Tensor) -> None:
        probabilities = torch.softmax(logits[0], -1)
        classes = probabilities.shape[-1]
        biases = -probabilities.mean(0)
        for step in range(50):  # about as many tokens for each
            chosen = (probabilities + biases).argmax(-1).bincount(minlength=classes)
            biases -= 0.1 / (1 + step) * (chosen / len(probabilities) - 1 / classes)
        spread = probabilities.std(0) * 0.5
        candidates = biases + torch.randn(500, 1, classes) * spread
        best = (probabilities + candidates).topk(min(2, classes), -1)
        used = torch.stack([(best.indices[..., 0] == c).any(1) for c in range(classes)]).sum(0)
        gap = (best.values[..., 0] - best.values[..., -1]).amin(1)
        router.balancing_biases.copy_(candidates[(used * (gap > 3e-5) + gap).argmax(), 0])

    return hook


@torch.inference_mode()
def scores(model: Any) -> torch.Tensor:
    """What transformers' routers choose by, `(layers, tokens, experts + 1)`."""
    found = []
    hooks = [
        router.register_forward_hook(
            lambda router, _, out: found.append(torch.softmax(out[0], -1) + router.balancing_biases)
        )
        for router in routers(model)
    ]
    model(torch.tensor([tokens(model.config.vocab_size)]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(found)


def margin(model: Any) -> float:
    """How far the closest choice is from a tie: rounding may decide what is nearer than 1e-5."""
    best = scores(model).topk(2, dim=-1).values
    return float((best[..., 0] - best[..., 1]).min())
