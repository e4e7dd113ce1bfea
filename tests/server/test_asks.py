"""What a model cannot honour is refused by the name of its field."""

from typing import Any

import pytest

from cetane.server.asks import check_choices
from cetane.server.errors import ApiError
from cetane.server.requests import ChatRequest

CALL = {"tools": [{"type": "function", "function": {"name": "now"}}], "tool_choice": "required"}
ASKED: dict[str, dict[str, Any]] = {
    "tool_choice": CALL,
    "response_format": {"response_format": {"type": "json_object"}},
    "logit_bias": {"logit_bias": {"1": 1.0}},
    "temperature": {"temperature": 1.0},
}


@pytest.mark.parametrize("field", ASKED)
def test_a_head_that_chooses_refuses_by_field(field: str) -> None:
    served: Any = type("Served", (), {"chooses": True})
    plain = {"model": "it", "messages": [{"role": "user", "content": "x"}], "temperature": 0.0}
    request = ChatRequest.model_validate(plain | ASKED[field])
    with pytest.raises(ApiError) as error:
        check_choices(request, served, None, "a grammar")
    assert error.value.param == field
