"""Plans say what their hosts must be able to do."""

from typing import Any

import pytest
from tests.conftest import InMemoryCheckpoint, build_model
from tests.families import test_mixtral, test_qwen3_next
from tests.families.zaya_models import recipe

from cetane.errors import CetaneError
from cetane.planner import Planner


def plan_of(model: Any, **options: Any) -> Any:
    return Planner(InMemoryCheckpoint(model), recipe("readonly", "per-block", **options)).plan()


def test_a_plain_plan() -> None:
    plan_of(build_model("llama")).check_plain("the host")


def test_matrices_and_several_experts_are_named() -> None:
    matrices = test_mixtral.build("qwen3_5_text", **test_qwen3_next.LAYERS)
    with pytest.raises(CetaneError, match="the host keeps no matrices"):
        plan_of(matrices).check_plain("the host")
    kind, config = test_mixtral.MODELS["mixtral"]
    routed = test_mixtral.build(kind, **config)
    plan_of(routed).check_plain("the host")  # dense: all experts in one graph
    with pytest.raises(CetaneError, match="one expert, not to several"):
        plan_of(routed, routed=("decode",)).check_plain("the host")
