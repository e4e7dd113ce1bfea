"""Rules on a plan that nothing was lowered of."""

import pytest
from tests.conftest import UnreadCheckpoint, build_model

from cetane.gates.residency.audit import audit
from cetane.gates.residency.sketch import sketch
from cetane.gates.residency.target import Target
from cetane.planner import Planner
from cetane.schema.recipe import parse_recipe


def found(contract: str, verify: int, form: str = "fp16") -> set[str]:
    """The rules that speak of a tiny plan for a phone."""
    content = {
        "name": "test",
        "cache": {"contract": contract, "context": 128},
        "tokens": {"verify": verify, "prefill": 0},
        "compression": {"default": form},
    }
    planner = Planner(UnreadCheckpoint(build_model("llama")), parse_recipe(content, "test"))
    audited = audit(sketch(planner), Target("a19-pro"))
    return {finding.rule for function in audited.functions for finding in function.findings}


@pytest.mark.parametrize(
    ("contract", "verify", "refused"),
    [("blend", 8, True), ("blend", 4, False), ("readonly", 8, False), ("shift", 8, False)],
)
def test_a_cache_that_the_graph_scatters(contract: str, verify: int, refused: bool) -> None:
    assert ("matmul-scatter" in found(contract, verify)) == refused


@pytest.mark.parametrize(
    ("deployment", "os", "refused"),
    [("iOS26", 18, True), ("iOS26", 26, False), ("iOS18", 18, False)],
)
def test_a_plan_for_a_newer_system(deployment: str, os: float, refused: bool) -> None:
    content = {"cache": {"context": 128}, "target": {"deployment": deployment}}
    recipe = parse_recipe({"name": "test"} | content, "test")
    planner = Planner(UnreadCheckpoint(build_model("llama")), recipe)
    audited = audit(sketch(planner), Target("m4-max", os))
    assert any("newer-system" in reason for reason in audited.reasons) == refused


def test_formats_of_weights() -> None:
    assert "int4-per-block" in found("readonly", 4, "int4-per-block32")
    assert "int4-per-block" not in found("readonly", 4, "palette4-kmeans-group32")


def test_weights_that_the_smallest_palette_cannot_divide() -> None:
    content = {"cache": {"context": 128}, "compression": {"default": "auto"}}
    recipe = parse_recipe({"name": "test"} | content, "test")
    sketched = sketch(Planner(UnreadCheckpoint(build_model("llama", hidden_size=48)), recipe))
    ops = [op for program in sketched.values() for f in program.functions.values() for op in f.ops]
    bytes_of_rows = {
        next(part for part in op.name.split(".")[1:] if part.endswith("_proj"))
        for op in ops
        if op.kind == "constexpr_blockwise_shift_scale"
    }
    assert bytes_of_rows == {"o_proj", "down_proj"}
