"""Rules of types and opsets against coremltools' own definitions of the ops."""

from dataclasses import replace
from typing import Any

import pytest
from coremltools.converters.mil.mil import types
from coremltools.converters.mil.mil.ops.registry import SSAOpRegistry
from tests.mil.programs import constant, op, program

from cetane.errors import CetaneError
from cetane.mil.op_types import ALIKE, ON_FLOATS, RESULTS
from cetane.mil.ops import OPS
from cetane.mil.opsets import NEW, VERSIONS
from cetane.mil.validate import check_function

UNTYPED = {"classify", "cond", "list_gather", "list_read", "list_scatter", "list_write",
           "make_list", "matmul", "read_state", "while_loop", "write_state"}  # fmt: skip
"""Ops on lists and bodies, states, which have a check of their own, and products."""


def definitions(kind: str) -> list[Any]:
    """coremltools' definitions of an op, from the oldest opset on."""
    by_version = SSAOpRegistry.core_ops.get(kind, {})
    return list(dict.fromkeys(by_version[version] for version in sorted(by_version, key=int)))


def domain(definition: Any, name: str) -> set[str]:
    """The types of an input."""
    allowed = definition.type_domains.get(definition.input_spec.input_types[name].type_domain_id)
    return {types.builtin_to_string(one) for one in allowed or ()}


def test_every_op_has_a_rule() -> None:
    assert RESULTS.keys() | UNTYPED == OPS.keys()


def test_ops_on_floats() -> None:
    found = {
        kind
        for kind in OPS
        for made in definitions(kind)
        if "x" in made.input_spec.input_types
        and made.input_spec.input_types["x"].__class__.__name__ == "TensorInputType"
        and domain(made, "x")
        and domain(made, "x") <= {"fp16", "fp32"}
    }
    assert found == ON_FLOATS


@pytest.mark.parametrize("kind", [kind for kind, names in ALIKE.items() if names != ("values",)])
def test_operands_of_one_type(kind: str) -> None:
    """They share a domain in every opset."""
    inputs = [made.input_spec.input_types for made in definitions(kind)]
    assert inputs, "coremltools has the op"
    for given in inputs:
        assert len({given[name].type_domain_id for name in ALIKE[kind] if name in given}) == 1


def test_what_came_with_an_opset() -> None:
    found: dict[str, set[str]] = {opset: set() for opset in VERSIONS}
    of = {version: opset for opset, version in VERSIONS.items()}
    for kind in OPS:
        seen: set[str] = set()
        for version, made in sorted(SSAOpRegistry.core_ops.get(kind, {}).items()):
            opset, names = of[max(int(version), 6)], set(made.input_spec.input_types)
            if not seen and opset != "CoreML5":
                found[opset].add(kind)
            elif opset != "CoreML5":
                found[opset] |= {f"{kind}.{name}" for name in names - seen}
            seen |= names
    assert found.pop("CoreML5") == found.pop("CoreML9") == set()
    found["CoreML8"].add("write_state")  # which coremltools writes for an op of its own
    assert found == {opset: set(names.split()) for opset, names in NEW.items()}


@pytest.mark.parametrize(
    ("opset", "kind", "inputs", "what"),
    [
        ("CoreML7", "slice_update", {"update": "x", "begin": constant([0]), "end": constant([2])},
         "slice_update came with CoreML8"),
        ("CoreML6", "gather_along_axis", {"indices": "i", "validate_indices": constant(0)},
         "gather_along_axis.validate_indices came with CoreML7"),
    ],
)  # fmt: skip
def test_an_op_of_a_newer_opset(opset: str, kind: str, inputs: dict[str, Any], what: str) -> None:
    i = op("shape", "i", "int32", (1,), x="x")
    size = (1,) if kind != "slice_update" else (2,)
    made = program({"x": (2,)}, i, op(kind, "y", "fp32", size, x="x", **inputs)).functions["main"]
    check_function(replace(made, opset="CoreML8"))
    with pytest.raises(CetaneError, match=f"{what}, and the function is of {opset}"):
        check_function(replace(made, opset=opset))


@pytest.mark.parametrize(
    ("kind", "inputs", "why"),
    [
        ("softmax", {"x": "i"}, "x is int32, and softmax takes floats"),
        ("logical_and", {"x": "i", "y": "i"}, "x is int32, and logical_and takes bool"),
        ("select", {"cond": "b", "a": "x", "b": "i"}, "a is fp32, b is int32"),
    ],
)
def test_operands_that_an_op_does_not_take(kind: str, inputs: dict[str, str], why: str) -> None:
    b = op("equal", "b", "bool", (2,), x="x", y="x")
    i = op("shape", "i", "int32", (1,), x="x")
    with pytest.raises(CetaneError, match=why):
        program({"x": (2,)}, i, b, op(kind, "y", "int32", (2,), **inputs))
