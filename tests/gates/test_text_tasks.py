"""Starts of a prompt run functions that windows of text may leave out."""

import pytest

from cetane.gates.idle_experts import idle_functions
from cetane.gates.observe import observe
from cetane.gates.text_tasks import start_tasks

from .mutations.families import build, recipe, tokenizer_of
from .mutations.ports import AuthoredPort, TinyCheckpoint


@pytest.mark.parametrize("capacities", [[], [32, 64, 96]])
def test_starts_of_a_prompt_run_every_function(capacities: list[int]) -> None:
    """Gemma 4 has functions of its own for calls without logits."""
    cache = {"contract": "readonly", "context": 128, "capacities": capacities}
    checkpoint = TinyCheckpoint(build("gemma4"), tokenizer_of())
    port = AuthoredPort(checkpoint, recipe("fp16", cache=cache))
    assert ("chunk-01", "fill") in port.plan.functions
    engine = port.shipped
    seen = observe(engine, port.planner, start_tasks(port.plan, port.tokenizer, peak=40))
    assert idle_functions(engine, None) == []
    assert all(len(one.at) >= 8 for one in seen)
