"""What may change in attention's weights while it computes the same."""

import pytest
import torch

from cetane.families.attention import Attention, AttentionForm
from cetane.families.grouped_query import AttentionHeads
from cetane.families.kinds import LayerKind
from cetane.families.rotary import RotaryTable


@pytest.mark.parametrize(
    ("form", "free"),
    [
        (AttentionForm(), True),
        (AttentionForm(qkv_bias=True, norms="whole", sinks=True), True),
        (AttentionForm(clip=1.0), False),
        (AttentionForm(gates="channel"), False),
        (AttentionForm(gates="head"), True),
    ],
    ids=str,
)
def test_values_turn_and_scale_if_nothing_stands_before_the_output(
    form: AttentionForm, free: bool
) -> None:
    kind = LayerKind(AttentionHeads(4, 2, 8, 1.0), RotaryTable(torch.ones(4)))
    attention = Attention(32, 1e-6, kind, form)
    assert (attention.value_space() is not None) == free
    assert bool(attention.exchanges()) == free
