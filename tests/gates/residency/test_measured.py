"""What a Mac measures: a stand-in for its Core ML, and the files that it writes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from coremltools.models import compute_plan, utils
from coremltools.models.compute_device import MLCPUComputeDevice, MLNeuralEngineComputeDevice
from tests.gates.residency.cases import many_convs
from tests.gates.residency.graphs import Model, mb

from cetane.errors import CetaneError
from cetane.gates.residency.audit import FunctionAudit, Placed, audit
from cetane.gates.residency.measured import (
    Measured,
    measure,
    read_measured,
    specification,
    with_measured,
)
from cetane.gates.residency.refuted import Audited, narrowing
from cetane.gates.residency.target import Target
from cetane.measuring.compute_plan import with_default
from cetane.mil import load
from cetane.mil.program import Program

REFUSED = "more-1"
"""The function that the stand-in does not compile."""


def body(x: Any) -> Any:
    return mb.reduce_argmax(x=mb.relu(x=many_convs(x, 2, "int8")), axis=1)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    wide = {"x": ((1, 2048, 1, 8), "fp16")}
    Model(body, inputs=wide, functions=3).program(tmp_path)
    return tmp_path / "model.mlpackage"


class Plan:
    """MLComputePlan of a Mac that runs everything on the ANE but activations."""

    def __init__(self, program: Program) -> None:
        self.model_structure = SimpleNamespace(
            program=SimpleNamespace(
                functions={
                    name: SimpleNamespace(block=SimpleNamespace(operations=list(ops(function))))
                    for name, function in program.functions.items()
                }
            )
        )

    @classmethod
    def load_from_path(cls, path: str, compute_units: Any) -> Plan:
        program = load(path)
        if program.default == REFUSED:
            raise RuntimeError("error code: -14\n  at load")
        return cls(program)

    def get_compute_device_usage_for_mlprogram_operation(self, op: Any) -> Any:
        if op.operator_name.endswith(("const", "shift_scale")):
            return None
        kind = MLCPUComputeDevice if "relu" in op.operator_name else MLNeuralEngineComputeDevice
        return SimpleNamespace(preferred_compute_device=object.__new__(kind))

    def get_estimated_cost_for_mlprogram_operation(self, op: Any) -> Any:
        return SimpleNamespace(weight=0.25) if "conv" in op.operator_name else None


def ops(function: Any) -> Any:
    for op in function.ops:
        outputs = [SimpleNamespace(name=value.name) for value in op.outputs]
        yield SimpleNamespace(operator_name=f"ios18.{op.kind}", outputs=outputs, blocks=[])


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("cetane.gates.residency.measured.sysctl", lambda name: f"<{name}>")
    monkeypatch.setattr(compute_plan, "MLComputePlan", Plan)
    monkeypatch.setattr(utils, "compile_model", lambda path, target: path)


def test_only_a_mac_measures(package: Path) -> None:
    with pytest.raises(CetaneError, match="only a Mac") as error:
        measure({"model": package})
    assert "--measured FILE" in str(error.value)


@pytest.mark.usefixtures("mac")
def test_measured_wins(package: Path) -> None:
    """Both are there, op by op, and the verdict follows the measurement."""
    said = measure({"model": package})
    plan = said.packages["model"].functions["main"]
    assert {op.kind: op.device for op in plan.ops} == {
        "const": None, "constexpr_blockwise_shift_scale": None, "conv": "ANE", "relu": "CPU",
        "reduce_argmax": "ANE",
    }  # fmt: skip
    assert [op.cost for op in plan.ops if op.kind == "conv"] == [0.25, 0.25]

    before = audit({"model": load(package)}, Target())
    found = with_measured(before, said, {"model": package})
    assert before.basis == "predicted"
    assert found.basis == "measured"
    main = next(f for f in found.functions if f.function == "main")
    assert {(op.kind, op.placement, op.measured) for op in main.ops} == {
        ("conv", "ANE", "ANE"), ("relu", "CPU", "CPU"), ("reduce_argmax", "CPU", "ANE"),
    }  # fmt: skip
    assert main.table()["ops_ane"] == 3
    refused = next(f for f in found.functions if f.function == REFUSED)
    assert {op.measured for op in refused.ops} == {"fails"}
    assert "-14" in str(said.packages["model"].functions[REFUSED].error)
    assert before.passed
    assert found.reasons == (
        f"fatal: Core ML refuses model/{REFUSED}: error code: -14 at load",
        "33.3% of the weights are read off the ANE, at most 1% may be",
    )


@pytest.mark.parametrize(
    ("device", "costs", "said"),
    [
        ({"exp": "CPU"}, {"conv": 0.47, "exp": 0.05, "reduce_argmax": 0.01}, None),
        ({"exp": "CPU"}, {"conv": 0.42, "exp": 0.06, "reduce_argmax": 0.1}, "6% off .*: exp 6%"),
        ({"exp": "GPU"}, {}, "25% off .*: exp 25%"),  # of four ops
        ({"reduce_argmax": "CPU"}, {"conv": 0.05, "exp": 0.1, "reduce_argmax": 0.8}, None),
    ],
    ids=["little time", "much time", "one of four ops", "a rule knows"],
)
def test_what_a_mac_runs_off_the_ane_against_all_rules(
    device: dict[str, str], costs: dict[str, float], said: str | None, tmp_path: Path
) -> None:
    """All weights are read on the ANE. By a rule, an argmax is the CPU's, so it may take time."""
    wide = {"x": ((1, 2048, 1, 8), "fp16")}
    Model(
        lambda x: mb.reduce_argmax(x=many_convs(mb.exp(x=x), 2, "int8"), axis=1),
        inputs=wide, functions=3,
    ).program(tmp_path)  # fmt: skip
    package = tmp_path / "model.mlpackage"
    functions = {
        name: {"ops": [
            {"output": op.outputs[0].name, "kind": op.kind, "device": device.get(op.kind, "ANE"),
             "cost": costs.get(op.kind)}
            for op in function.ops
        ]}
        for name, function in load(package).functions.items()
    }  # fmt: skip
    packages = {"model": {"specification": specification(package), "functions": functions}}
    measured = Measured.model_validate(
        {"machine": "m", "system": "s", "tools": "t", "date": "d", "packages": packages}
    )
    found = with_measured(audit({"model": load(package)}, Target()), measured, {"model": package})
    if said is None:
        assert found.passed
    else:
        assert len(found.reasons) == 1
        assert re.match(f"model/.* and 2 more: a Mac runs {said}; try", found.reasons[0])


@pytest.mark.usefixtures("mac")
def test_a_mac_refutes_a_finding(tmp_path: Path) -> None:
    """int4 per block is predicted off the ANE; where it was measured on it, it passes."""
    wide = {"x": ((1, 2048, 1, 8), "fp16")}
    Model(lambda x: many_convs(x, 2, "int4-block32"), inputs=wide).program(tmp_path)
    packages = {"model": tmp_path / "model.mlpackage"}
    predicted = audit({"model": load(packages["model"])}, Target())
    assert not predicted.passed
    assert with_measured(predicted, measure(packages), packages).passed


@pytest.mark.usefixtures("mac")
@pytest.mark.parametrize(
    ("shapes", "left"),
    [
        ({"enumerated": ((1, 2048, 1, 8), (1, 2048, 1, 16))}, ()),
        ({"ranges": {3: (1, 8)}}, ("silent: non-default-shape",)),
    ],
    ids=["enumerated", "range"],
)
def test_a_mac_refutes_a_finding_at_all_shapes(
    shapes: dict[str, Any], left: tuple[str, ...], tmp_path: Path
) -> None:
    """A Mac measures the default shape alone: a finding about the others still counts."""
    wide = {"x": ((1, 2048, 1, 8), "fp16")}
    model = Model(lambda x: many_convs(x, 2, "int4-block32"), inputs=wide, **shapes)
    model.program(tmp_path)
    packages = {"model": tmp_path / "model.mlpackage"}
    predicted = audit({"model": load(packages["model"])}, Target())
    assert len(predicted.functions) == 2
    assert "silent: int4-per-block" in predicted.reasons
    assert with_measured(predicted, measure(packages), packages).reasons == left


def test_functions_with_a_finding_are_counted(tmp_path: Path) -> None:
    wide = {"x": ((1, 2048, 1, 8), "fp16")}
    model = Model(lambda x: many_convs(x, 2, "int4-block32"), inputs=wide, functions=3)
    found = audit({"model": model.program(tmp_path)}, Target())
    assert found.reasons[0] == "silent: int4-per-block (3 functions)"


@pytest.mark.usefixtures("mac")
def test_a_file_of_measurements(package: Path, tmp_path: Path) -> None:
    said = measure({"model": package})
    file = tmp_path / "measured.json"
    file.write_text(said.model_dump_json())
    assert read_measured(file) == said
    in_bundle = {"bundle": "0" * 64, "measured": said.model_dump(mode="json")}
    file.write_text(json.dumps(in_bundle))
    assert read_measured(file) == said

    other = said.model_copy(
        update={"packages": {"model": said.packages["model"].model_copy(
            update={"specification": "0" * 64})}}
    )  # fmt: skip
    found = audit({"model": load(package)}, Target())
    with pytest.raises(CetaneError, match="another build of model"):
        with_measured(found, other, {"model": package})
    with pytest.raises(CetaneError, match="the packages model, not of elsewhere"):
        with_measured(found, said, {"elsewhere": package})


@pytest.mark.parametrize(
    "content",
    [
        b"", b"[]", b"{}", b"\xff\xfe", b"[" * 100_000, b'{"schema_version": 2}',
        json.dumps({"machine": "m", "system": "s", "tools": "t", "date": "d", "packages": {
            "p": {"specification": "0", "functions": {"f": {"ops": [
                {"output": "y", "kind": "conv", "device": "TPU"}]}}}}}).encode(),
    ],
    ids=["empty", "list", "no keys", "not text", "deep", "schema", "device"],
)  # fmt: skip
def test_bad_files_of_measurements(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "measured.json"
    file.write_bytes(content)
    with pytest.raises(CetaneError, match=r"not measurements of a Mac|is not valid JSON"):
        read_measured(file)


def test_no_file_of_measurements(tmp_path: Path) -> None:
    with pytest.raises(CetaneError, match="No such file"):
        read_measured(tmp_path / "nothing.json")


def test_every_function_becomes_the_default(package: Path, tmp_path: Path) -> None:
    for name in ("main", "more-2"):
        folder = tmp_path / name
        folder.mkdir()
        copy = load(with_default(package, name, folder))
        assert copy.default == name
        assert copy.functions.keys() == load(package).functions.keys()
    assert load(package).default == "main"


def test_measurements_are_read_without_what_is_not_known() -> None:
    """A later version may say more."""
    said = Measured.model_validate(
        {"machine": "m", "system": "s", "tools": "t", "date": "d", "packages": {}, "more": 1}
    )
    assert str(said) == "m, s, d"


def seen(kind: str, measured: str, tokens: int = 1, package: str = "p") -> Audited:
    op = Placed(kind, kind, kind, "ANE", "r", "high", measured=measured)  # type: ignore[arg-type]
    return FunctionAudit(package, "f", "", tokens, (op,), ()), op


@pytest.mark.parametrize(
    ("wrong", "right", "said"),
    [
        ([seen("relu", "CPU")], [seen("conv", "ANE"), seen("add", "ANE")], "all but kind relu"),
        ([seen("a", "CPU"), seen("b", "CPU")], [seen("c", "ANE")], "it held only for kind c"),
        ([seen("a", "CPU", 4)], [seen("a", "ANE", 1)], "all but T 4"),
        ([seen("a", "CPU", package="q")], [seen("a", "ANE")], "all but package q"),
        ([seen("a", "CPU")], [seen("a", "ANE")], "no kind, width or package"),
        ([seen("a", "CPU")], [], "it held for no op here"),
    ],
)
def test_what_tells_wrong_ops_from_right_ones(
    wrong: list[Audited], right: list[Audited], said: str
) -> None:
    assert narrowing(wrong, right).startswith(said)
