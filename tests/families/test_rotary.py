"""Rotary tables against transformers' rotary embedding modules."""

from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.zaya.modeling_zaya import ZayaRotaryEmbedding

from cetane.errors import CetaneError
from cetane.families.llama import author
from cetane.families.options import ResidualOptions
from cetane.families.rotary import rotary_table

POSITIONS = 300


def config(dim: int = 16, **rope: Any) -> Any:
    return transformers.AutoConfig.for_model(
        "llama",
        hidden_size=64,
        num_attention_heads=4,
        head_dim=dim,
        max_position_embeddings=POSITIONS,
        rope_parameters={"rope_theta": 1e4} | rope,
    )


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "default", "rope_theta": 5e5},
        {"rope_type": "linear", "factor": 4.0},
        LLAMA3,
        LLAMA3 | {"rope_theta": 5e5, "low_freq_factor": 2.0},
        YARN,
        YARN | {"beta_fast": 16.0, "beta_slow": 2.0},
        YARN | {"mscale": 0.7, "mscale_all_dim": 0.5},
        YARN | {"attention_factor": 1.5},
        YARN | {"truncate": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("dim", [2, 6, 10, 16, 64])
def test_tables(rope: dict[str, Any], dim: int) -> None:
    settings = config(dim, **rope)
    expected = LlamaRotaryEmbedding(settings)(torch.zeros(1), torch.arange(POSITIONS)[None])
    table = rotary_table(settings, dim).cos_sin(POSITIONS)
    assert table.shape == (2, POSITIONS, dim)
    assert table.dtype == torch.float32
    torch.testing.assert_close(table, torch.cat(expected), rtol=0, atol=1e-6)


def test_a_table_by_hand() -> None:
    table = rotary_table(config(4, rope_type="default", rope_theta=100.0), 4).cos_sin(3)
    angles = torch.tensor([2.0, 0.2, 2.0, 0.2])  # position 2, frequencies 1 and 100 ** -1/2
    torch.testing.assert_close(table[:, 2], torch.stack([angles.cos(), angles.sin()]))


def test_frequencies_that_depend_on_the_length_are_refused() -> None:
    factors = {"factor": 2.0, "short_factor": [1] * 8, "long_factor": [2] * 8}
    message = "rope type 'longrope' .known: default, linear, llama3"
    with pytest.raises(CetaneError, match=message):
        rotary_table(config(rope_type="longrope", **factors), 16)


@pytest.mark.parametrize("dim", [6, 16, 64])
def test_a_table_that_grows_only_beyond_the_context(dim: int) -> None:
    settings = config(dim, rope_type="dynamic", factor=2.0)
    reference = LlamaRotaryEmbedding(settings)
    table = rotary_table(settings, dim).cos_sin(POSITIONS)
    expected = reference(torch.zeros(1), torch.arange(POSITIONS)[None])
    torch.testing.assert_close(table, torch.cat(expected), rtol=0, atol=1e-6)
    longer = torch.cat(reference(torch.zeros(1), torch.arange(POSITIONS + 1)[None]))
    assert (longer[:, :POSITIONS] - table).abs().max() > 1e-3
    assert author(settings, ResidualOptions()).max_context == POSITIONS


def test_partial_rotary_is_refused() -> None:
    """Where transformers would fail."""
    settings = config(rope_type="linear", factor=2.0, partial_rotary_factor=0.5)
    wanted = r"linear' with partial_rotary_factor = 0\.5, which gives positions to 8 of 16"
    with pytest.raises(CetaneError, match=wanted):
        rotary_table(settings, 16)


def test_a_factor_that_transformers_ignores() -> None:
    whole, part = (
        rotary_table(config(rope_type="default", partial_rotary_factor=factor), 16)
        for factor in (1.0, 0.5)
    )
    assert torch.equal(whole.inverse_frequencies, part.inverse_frequencies)


def zaya(dim: int, **rope: Any) -> Any:
    """A config with other rotary parameters for the windowed layers."""
    parameters = {"hybrid": {"rope_type": "default", "rope_theta": 5e6}}
    parameters["hybrid_sliding"] = {"rope_theta": 1e4} | rope
    return transformers.AutoConfig.for_model(
        "zaya",
        head_dim=dim,
        num_hidden_layers=2,
        layer_types=["hybrid", "hybrid_sliding"],
        sliding_window=5,
        max_position_embeddings=POSITIONS,
        rope_parameters=parameters,
    )


@pytest.mark.parametrize("part", [0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("rope", [{"rope_type": "default"}, {"rope_type": "linear", "factor": 4.0}])
@pytest.mark.parametrize("dim", [8, 16, 64])
def test_tables_by_kind_of_layer(rope: dict[str, Any], dim: int, part: float) -> None:
    settings = zaya(dim, partial_rotary_factor=part, **rope)
    reference = ZayaRotaryEmbedding(settings)
    for kind in settings.layer_types:
        expected = reference(torch.zeros(1), torch.arange(POSITIONS)[None], kind)
        table = rotary_table(settings, dim, kind).cos_sin(POSITIONS)
        assert table.shape == (2, POSITIONS, dim * part if kind == "hybrid_sliding" else dim)
        torch.testing.assert_close(table, torch.cat(expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "part", [0, -0.5, 1.5, 0.1, 0.01, 0.2, None, "half", float("nan"), float("inf"), 10**400]
)
def test_parts_of_a_head_that_cannot_be_rotated(part: Any) -> None:
    settings = zaya(16)
    settings.rope_parameters["hybrid_sliding"]["partial_rotary_factor"] = part
    with pytest.raises(CetaneError, match="of 16 channels"):
        rotary_table(settings, 16, "hybrid_sliding")


@pytest.mark.parametrize("parameters", [{}, {"hybrid_sliding": None}, {"hybrid_sliding": 7}])
def test_a_kind_of_layer_without_parameters(parameters: dict[str, Any]) -> None:
    settings = zaya(16)
    settings.rope_parameters = parameters
    with pytest.raises(CetaneError, match="rope_parameters has no 'hybrid_sliding'"):
        rotary_table(settings, 16, "hybrid_sliding")


@pytest.mark.parametrize("kind", [{"rope_type": "default"}, {"rope_type": "linear", "factor": 2.0}])
@pytest.mark.parametrize("theta", [None, "1", -1.0, 0, float("nan"), float("inf"), 10**400])
def test_a_theta_that_is_no_positive_number(kind: dict[str, Any], theta: Any) -> None:
    settings = config()
    settings.rope_parameters = kind | {"rope_theta": theta}
    with pytest.raises(CetaneError, match=r"rope_theta = .* not a positive number"):
        rotary_table(settings, 16)


@pytest.mark.parametrize("dim", [2**16 + 2, 2**31])
def test_a_head_that_no_model_has(dim: int) -> None:
    with pytest.raises(CetaneError, match=f"a head has {dim} channels, more than 65536"):
        rotary_table(config(), dim)


@pytest.mark.parametrize("factor", [None, "a", 0])
def test_a_factor_that_is_no_positive_number(factor: Any) -> None:
    settings = config()
    settings.rope_parameters = {"rope_type": "linear", "rope_theta": 1e4, "factor": factor}
    with pytest.raises(CetaneError, match="rope parameters of type linear"):
        rotary_table(settings, 16)
