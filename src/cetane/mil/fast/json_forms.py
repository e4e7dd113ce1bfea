"""The parts of a prepared model's index as JSON, and back: signatures, feedings, attentions.

What is read back is what was written: `prepared` checks the index's hash first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cetane.mil.dtypes import Array
from cetane.mil.fast.attention_stage import AttentionStage, Operand, View
from cetane.mil.fast.functions import Feeding
from cetane.mil.program import Signature, SizeRange, TensorType


def signature_as_json(signature: Signature) -> dict[str, Any]:
    """The types of a function's inputs, outputs and states, by name."""
    kinds = {"inputs": signature.inputs, "outputs": signature.outputs, "states": signature.states}
    return {what: {n: _type_as_json(t) for n, t in types.items()} for what, types in kinds.items()}


def signature_from_json(name: str, content: dict[str, Any]) -> Signature:
    """The signature of the function `name`."""
    return Signature(
        name,
        *(
            {n: _type_from_json(t) for n, t in content[what].items()}
            for what in ("inputs", "outputs", "states")
        ),
    )


def feeding_as_json(feeding: Feeding) -> dict[str, Any]:
    """A feeding; its constants are small, and lists of numbers with their dtypes."""
    return {
        "whole": feeding.whole,
        "views": {name: _operand_as_json(view) for name, view in feeding.views.items()},
        "constants": {n: [str(a.dtype), a.tolist()] for n, a in feeding.constants.items()},
        "results": feeding.results,
    }


def feeding_from_json(content: dict[str, Any]) -> Feeding:
    """The feeding that was written."""
    constants: dict[str, Array] = {
        n: np.array(values, dtype) for n, (dtype, values) in content["constants"].items()
    }
    views = {n: View(*view) for n, view in content["views"].items()}
    return Feeding(tuple(content["whole"]), views, constants, dict(content["results"]))


def attention_as_json(attention: AttentionStage) -> dict[str, Any]:
    """An attention: the names of its operands and result, and its numbers."""
    return {
        "rows": _operand_as_json(attention.rows),
        "keys": [_operand_as_json(part) for part in attention.keys],
        "values": [_operand_as_json(part) for part in attention.values],
        "mask": _operand_as_json(attention.mask),
        "result": attention.result,
        "cap": attention.cap,
        "sinks": None if attention.sinks is None else _operand_as_json(attention.sinks),
        "exact": attention.exact,
    }


def attention_from_json(content: dict[str, Any]) -> AttentionStage:
    """The attention that was written."""
    sinks = content["sinks"]
    return AttentionStage(
        rows=_operand_from_json(content["rows"]),
        keys=tuple(map(_operand_from_json, content["keys"])),
        values=tuple(map(_operand_from_json, content["values"])),
        mask=_operand_from_json(content["mask"]),
        result=content["result"],
        cap=content["cap"],
        sinks=None if sinks is None else _operand_from_json(sinks),
        exact=content["exact"],
    )


def _operand_as_json(operand: Operand) -> str | list[str | int]:
    if isinstance(operand, str):
        return operand
    return [operand.source, operand.begin, operand.end]


def _operand_from_json(content: str | list[Any]) -> Operand:
    return content if isinstance(content, str) else View(*content)


def _type_as_json(type_: TensorType) -> list[Any]:
    shape = [s if isinstance(s, int) else [s.lower, s.upper] for s in type_.shape]
    return [shape, type_.dtype, type_.default, type_.enumerated, type_.any_shape]


def _type_from_json(content: list[Any]) -> TensorType:
    shape, dtype, default, enumerated, any_shape = content
    return TensorType(
        tuple(s if isinstance(s, int) else SizeRange(*s) for s in shape),
        dtype,
        None if default is None else tuple(default),
        tuple(map(tuple, enumerated)),
        any_shape,
    )
