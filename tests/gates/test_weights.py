"""No parameter of the model may be left out of its programs."""

from dataclasses import replace

import pytest
from tests.conftest import InMemoryCheckpoint, build_model
from tests.families.matrix_models import QWEN_NEXT
from tests.families.mixture_models import MIXTURES, build_mixture
from tests.families.recipes import recipe

from cetane.compress import Selection
from cetane.families import Held, RoutedBlock, Weight
from cetane.gates.weights import uncompared, unused_parameters
from cetane.planner import Planner


@pytest.mark.parametrize("kind", ["qwen2_moe", "qwen3_next", "qwen3_5_moe_text"])
def test_a_gate_of_no_shared_experts_is_not_missed(kind: str) -> None:
    """A gate that no program uses is missed where the shared experts have channels."""
    own = build_mixture(
        kind,
        **(QWEN_NEXT | {"qwen2_moe": MIXTURES["qwen2_moe"][1]})[kind]
        | {"shared_expert_intermediate_size": 0},
    )
    planner = Planner(InMemoryCheckpoint(own), recipe())  # type: ignore[arg-type]
    shapes = {name: tuple(tensor.shape) for name, tensor in own.named_parameters()}
    gates = [name for name in shapes if name.endswith("shared_expert_gate.weight")]
    assert gates
    assert [*unused_parameters(planner, shapes)] == []
    filled = {name: shape if 0 not in shape else (8, 64) for name, shape in shapes.items()}
    problems = [*unused_parameters(planner, filled)]
    assert all(f"{name}: 0 of 64 elements are used" in problems for name in gates)


def test_an_expert_that_reads_anothers_weights() -> None:
    """No token need take it. Gates and ups lie in one tensor, so each is only a part of it."""
    own = build_mixture("mixtral", num_local_experts=4)
    planner = Planner(InMemoryCheckpoint(own), recipe())  # type: ignore[arg-type]
    shapes = {name: tuple(tensor.shape) for name, tensor in own.named_parameters()}
    assert [*unused_parameters(planner, shapes)] == []
    block = next(one for one in planner.model.layers if isinstance(one, RoutedBlock))
    weight = block.weight

    def read(path: str, shape: tuple[int, ...], held: Held) -> Weight:
        item = weight(path, shape, held)
        return replace(item, rows=(1, 2)) if item.rows == (0, 1) else item

    block.weight = read  # type: ignore[method-assign]
    names = {name for name in shapes if f".{block.layer}." in name and ".experts." in name}
    problems = [*unused_parameters(planner, shapes)]
    assert {problem.partition(":")[0] for problem in problems} == names != set()


def test_a_lost_file_of_fitted_constants_is_told() -> None:
    """Without it, one channel of half its size passes in few bits."""
    checkpoint = InMemoryCheckpoint(build_model("llama"))
    file = {"file": "lost.safetensors", "sha256": "0" * 64}
    lost = Selection.model_validate({"method": "gptq", "fitted": file})
    (told,) = uncompared(checkpoint, lost)  # type: ignore[arg-type]
    assert "lost.safetensors" in told and "had only to resemble their weights" in told
    assert [*uncompared(checkpoint, Selection())] == []  # type: ignore[arg-type]
