"""Attention against torch's own."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.families.test_layers import random, small
from torch import nn
from transformers.models.llama.modeling_llama import repeat_kv

from cetane.families.axes import Axes
from cetane.families.grouped_query import AttentionHeads, attend, blocks
from cetane.schema.interface import MASKED


@pytest.mark.parametrize(("order", "shape"), [("c1t", (1, 6, 1, 5)), ("ct1", (1, 6, 5, 1))])
def test_heads_split_and_merge(order: str, shape: tuple[int, ...]) -> None:
    heads, x = AttentionHeads(3, 1, 2, 1.0, axes=Axes(order)), random(*shape)
    split = heads.split(x, 3)
    assert split.shape == (1, 3, 2, 5)
    assert torch.equal(split[0, 1, 0], x.reshape(6, 5)[2])  # head 1 starts at channel 2
    assert torch.equal(heads.merge(split), x)


@small
@given(
    st.integers(1, 3),
    st.sampled_from([1, 2, 3, 4, 8]),
    st.sampled_from([6, 10, 16]),
    st.integers(1, 5),
    st.integers(1, 9),
    st.integers(0, 99),
)
def test_attend(kv: int, groups: int, dim: int, tokens: int, keys: int, seed: int) -> None:
    q = random(1, kv * groups, tokens, dim, seed=seed)
    k, v = random(1, kv, keys, dim, seed=seed + 1), random(1, kv, keys, dim, seed=seed + 2)
    seen = random(tokens, keys, seed=seed + 3) > 0
    seen[:, 0] = True
    expected = nn.functional.scaled_dot_product_attention(
        q, repeat_kv(k, groups), repeat_kv(v, groups), attn_mask=seen, scale=0.3
    )
    mask = torch.where(seen, 0.0, MASKED).repeat(groups, 1)[None, None]
    result = attend(q.mT, k.mT, v.mT, mask, AttentionHeads(kv * groups, kv, dim, 0.3))
    torch.testing.assert_close(result.mT, expected, rtol=1e-4, atol=1e-5)


def test_masked_keys_weigh_nothing_and_fit_fp16() -> None:
    assert torch.isfinite(torch.tensor(MASKED, dtype=torch.float16))
    one, other = random(1, 1, 4, 3), random(1, 1, 4, 3, seed=1)
    mask = torch.tensor([0.0, 0.0, MASKED])[None, None, None]
    heads, q = AttentionHeads(1, 1, 4, 1.0), random(1, 1, 4, 1, seed=2)
    changed = torch.cat([one[..., :2], other[..., 2:] * 1e3], -1)
    assert torch.equal(attend(q, one, one, mask, heads), attend(q, changed, changed, mask, heads))


def test_blocks_of_keys() -> None:
    """A call's own tokens never are a block: a cache of the most keys is read whole."""
    assert blocks(8196, 4, 8192) == [slice(0, 8196)]
    assert blocks(16388, 4, 8192) == [slice(0, 8192), slice(8192, 16388)]
    assert blocks(8192, 4, 8192) == [slice(0, 8192)]  # a contract whose slots hold the new tokens
    assert blocks(16384, 4, 8192) == [slice(0, 8192), slice(8192, 16384)]
    assert blocks(3000, 64, 1024) == [slice(0, 1024), slice(1024, 2048), slice(2048, 3000)]
    assert blocks(64, 64, 8192) == [slice(0, 64)]  # no cache
