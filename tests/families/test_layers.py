"""The shared primitives against transformers' and torch's own."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from cetane.families.axes import tensor_layout
from cetane.families.layers import (
    ACTIVATIONS,
    XIELU,
    CausalConvolution,
    CausalTaps,
    LayerNorm,
    Projection,
    RMSNorm,
    activation,
    apply_rotary,
    layer_norm,
    normalize,
    softplus,
)
from cetane.schema.interface import hidden_shape

small = settings(max_examples=30, derandomize=True)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scale", [1e-4, 1.0, 300.0, 6e4])
@pytest.mark.parametrize("eps", [1e-6, 1e-5, 0.5])
@pytest.mark.parametrize("axis", [1, 2])
def test_rms_norm(scale: float, eps: float, axis: int) -> None:
    x, gain = random(2, 8, 6, 5) * scale, random(8 if axis == 1 else 6, seed=1)
    ours, theirs = RMSNorm(len(gain), eps, axis), LlamaRMSNorm(len(gain), eps)
    ours.weight.data = gain.reshape(ours.weight.shape)
    theirs.weight.data = gain
    expected = theirs(x.movedim(axis, -1)).movedim(-1, axis)
    torch.testing.assert_close(ours(x), expected, rtol=1e-5, atol=1e-6)


def test_rms_norm_does_not_subtract_the_mean() -> None:
    norm = RMSNorm(4, 0.0)
    norm.weight.data = torch.tensor([1.0, 2.0, 3.0, 4.0]).reshape(norm.weight.shape)
    x = torch.full((1, 4, 1, 1), 7.0)
    assert norm(x).flatten().tolist() == pytest.approx([1, 2, 3, 4])


def test_layer_norm_is_torchs() -> None:
    x = random(1, 3, 8, 5) * 10 + 3
    expected = nn.functional.layer_norm(x.movedim(2, -1), (8,), eps=1e-5).movedim(-1, 2)
    torch.testing.assert_close(layer_norm(x, 2, 1e-5), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", [1e-4, 1.0, 300.0, 6e4])
@pytest.mark.parametrize("parts", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("axis", [1, 2])
def test_layer_norm_module(scale: float, parts: tuple[bool, bool], axis: int) -> None:
    size = 8 if axis == 1 else 6
    x, given = random(2, 8, 6, 5) * scale + scale, random(2, size, seed=1)
    ours = LayerNorm(size, 1e-5, axis, weight=parts[0], bias=parts[1])
    values = dict(zip(("weight", "bias"), given, strict=True))
    own = {name: values[name] for name, there in zip(values, parts, strict=True) if there}
    for name, value in own.items():
        parameter = ours.get_parameter(name)
        parameter.data = value.reshape(parameter.shape)
    expected = nn.functional.layer_norm(x.movedim(axis, -1), (size,), eps=1e-5, **own)
    torch.testing.assert_close(ours(x), expected.movedim(-1, axis), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("order", ["c1t", "ct1"])
def test_projection_is_a_linear_layer(bias: bool, order: str) -> None:
    linear, projection = nn.Linear(12, 7, bias=bias), Projection(12, 7, "mlp", bias)
    projection.weight.data = linear.weight.data[..., None, None]
    if bias:
        projection.bias.data = linear.bias.data
    x = random(5, 12)
    out = projection(x.T.reshape(hidden_shape(order, 12, 5)))
    assert out.shape == hidden_shape(order, 7, 5)
    torch.testing.assert_close(out.reshape(7, 5).T, linear(x))


@pytest.mark.parametrize("taps", [1, 2, 3])
@pytest.mark.parametrize("groups", [12, 3, 1])
@pytest.mark.parametrize("order", ["c1t", "ct1"])
def test_causal_convolution(taps: int, groups: int, order: str) -> None:
    theirs = nn.Conv1d(12, 12, taps, groups=groups)
    with tensor_layout(order):
        ours = CausalConvolution(12, taps, groups)
    assert ours.held["weight"].stored == theirs.weight.shape
    ours.weight.data = theirs.weight.data.reshape(ours.weight.shape)
    ours.bias.data = theirs.bias.data
    x = random(1, 12, taps + 4)
    out = ours(x.reshape(hidden_shape(order, 12, taps + 4)))
    assert out.shape == hidden_shape(order, 12, 5)
    torch.testing.assert_close(out.reshape(1, 12, 5), theirs(x))


@pytest.mark.parametrize("taps", [1, 2, 3])
@pytest.mark.parametrize("order", ["c1t", "ct1"])
def test_causal_taps(taps: int, order: str) -> None:
    """A depthwise convolution without a convolution."""
    theirs = nn.Conv1d(12, 12, taps, groups=12)
    with tensor_layout(order):
        ours = CausalTaps(12, taps)
    for name in ours.taps:
        held = ours.held[name]
        assert held.stored == theirs.weight.shape
        ours.get_parameter(name).data = held.pick(theirs.weight.data).reshape(1, 12, 1, 1)
    ours.bias.data = theirs.bias.data.reshape(ours.bias.shape)
    x = random(1, 12, taps + 4)
    out = ours(x.reshape(hidden_shape(order, 12, taps + 4)))
    assert out.shape == hidden_shape(order, 12, 5)
    torch.testing.assert_close(out.reshape(1, 12, 5), theirs(x))


SYNONYMS = ("gelu_fast", "gelu_accurate", "gelu_python_tanh", "gelu_python")


@pytest.mark.parametrize("name", sorted({*ACTIVATIONS, *SYNONYMS}))
def test_activations(name: str) -> None:
    x = torch.linspace(-8, 8, 101)
    torch.testing.assert_close(activation(name)(x), ACT2FN[name](x))


def test_softplus_never_sees_what_overflows(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, plain = [], nn.functional.softplus
    monkeypatch.setattr(nn.functional, "softplus", lambda x: seen.append(x.max()) or plain(x))
    x = torch.linspace(-30, 60, 1000)
    torch.testing.assert_close(softplus(x), torch.logaddexp(x, torch.zeros(())), atol=5e-5, rtol=0)
    assert max(seen) <= 10


def test_unknown_activation_names_the_known() -> None:
    with pytest.raises(ValueError, match="hidden_act = 'mish'; known: silu, gelu"):
        activation("mish")


@small
@given(st.integers(1, 4), st.integers(1, 12), st.integers(1, 6), st.integers(0, 99))
def test_positions(heads: int, half: int, tokens: int, seed: int) -> None:
    q = random(1, heads, tokens, 2 * half, seed=seed)
    angles = random(tokens, half, seed=seed + 1) * 10
    cos, sin = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))
    expected, _ = apply_rotary_pos_emb(q, q, cos[None], sin[None])
    result = apply_rotary(q.mT, cos.T[None, None], sin.T[None, None], 2 * half)
    torch.testing.assert_close(result.mT, expected)


@pytest.mark.parametrize("width", [2, 4, 6])
def test_positions_leave_the_rest_of_a_head(width: int) -> None:
    x, angles = random(1, 2, 6, 5), random(width, 5, seed=1)[None, None]
    result = apply_rotary(x, angles.cos(), angles.sin(), width)
    assert torch.equal(result[:, :, width:], x[:, :, width:])
    positioned = apply_rotary(x[:, :, :width], angles.cos(), angles.sin(), width)
    assert torch.equal(result[:, :, :width], positioned)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 6e4])
def test_normalize(scale: float) -> None:
    x = random(2, 3, 8, 5) * scale
    result = normalize(x, 8, 1e-12, axis=2)
    torch.testing.assert_close(result, x / x.norm(dim=2, keepdim=True) * 8**0.5)
    assert not normalize(torch.zeros(1, 8, 1, 1), 8, 1e-12, axis=1).any()


def test_xielus_parameters_are_computed_in_fp32() -> None:
    """The released models store them in bfloat16, and the reference reads them in fp32."""
    stored = torch.linspace(-3, 3, 13).bfloat16()
    wanted = np.log1p(np.exp(stored.double().numpy()))
    for name in ("alpha_p", "alpha_n"):
        pick = XIELU().held[name].pick
        assert pick is not None
        np.testing.assert_allclose(pick(stored).numpy(), wanted, rtol=1e-6)
