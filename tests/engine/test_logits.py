"""Choices of a head become logits."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cetane.engine.logits import HeadRows, Logits
from cetane.errors import CetaneError
from cetane.schema.interface import ToChoice

PLAN: Any = SimpleNamespace(vocab=8, choosable=np.arange(8), softcap=None)


@pytest.mark.parametrize("row", [-1.0, 4.0, np.nan])
def test_a_choice_outside_its_rows(row: float) -> None:
    """Among NaN no row is the largest, so the logits are NaN too. Else the head is wrong."""
    slice_ = {"start": 2, "stop": 6}
    for logit in (np.nan, 1.5):
        made = Logits(HeadRows(PLAN), 2)
        made.add(ToChoice(part="row", **slice_), np.array([[0.0, 0.0], [row, 3.0]]))
        value = np.array([[logit, 2.5]], np.float32)
        if np.isfinite(logit):
            with pytest.raises(CetaneError, match="chose a row that it does not have"):
                made.add(ToChoice(part="logit", **slice_), value)
            continue
        made.add(ToChoice(part="logit", **slice_), value)
        assert made.rows is not None
        assert np.isnan(made.rows[0].max())
        assert made.rows[1].argmax() == 5 and made.rows[1].max() == 2.5
