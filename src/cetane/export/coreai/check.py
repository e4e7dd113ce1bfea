"""Warnings about a program that no tool of Core AI's gives without a Mac."""

import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from pydantic import Field

from cetane.export.coreai import contract
from cetane.files import shipped_text
from cetane.validation import Data

if TYPE_CHECKING:
    from coreai.authoring import AIProgram

SELECTING = {"coreai.sort", "coreai.argsort", "coreai.argmax", "coreai.argmin"}
ALIGNED = 32
"""fp16 numbers in 64 bytes."""


class RuleSource(Data):
    """One piece of evidence, with the date of its publication."""

    claim: str
    where: str
    date: str


class ExportRule(Data):
    """A pattern in a program, what it costs, and what to do."""

    id: str
    message: str
    fix: str
    sources: tuple[RuleSource, ...] = Field(min_length=1)
    most: int | None = None
    """The largest number that was seen to work, for a rule that counts."""


@dataclass(frozen=True)
class AssetOp:
    """An operation: its name, and the types of its operands and results."""

    kind: str
    operands: tuple[str, ...]
    results: tuple[str, ...]


@dataclass(frozen=True)
class AssetCall:
    """A function: its ops, and the types of its inputs, states and outputs."""

    name: str
    tensors: tuple[str, ...]
    ops: tuple[AssetOp, ...]


@cache
def rules() -> dict[str, ExportRule]:
    """The rules, by id."""
    content = tomllib.loads(shipped_text("export/coreai/rules.toml"))
    return {rule["id"]: ExportRule(**rule) for rule in content["rule"]}


def check(program: "AIProgram") -> list[str]:
    """A warning for every rule that a program breaks."""
    calls = list(functions(program))
    warnings = []
    for rule in rules().values():
        detail = PREDICATES[rule.id](calls, rule)
        if detail is not None:
            warnings.append(f"{rule.id}: {rule.message} ({detail}): {rule.fix}")
    return warnings


def functions(program: "AIProgram") -> Iterator[AssetCall]:
    """The functions that a host calls. The compiler has its own code for composite operations such
    as a norm, so their bodies do not count."""
    for graph in program._module._body.operations:
        held: Any = graph
        if "composite_decl" in held.attributes:
            continue
        tensors = (*held.type.inputs, *held.type.results)
        yield AssetCall(
            held.sym_name.value,
            tuple(text for tensor in tensors if "token" not in (text := str(tensor))),
            tuple(operations(held)),
        )


def operations(graph: Any) -> Iterator[AssetOp]:
    for op in graph.regions[0].blocks[0].operations:
        types = [tuple(str(value.type) for value in part) for part in (op.operands, op.results)]
        yield AssetOp(op.operation.name, *types)


def in_fp32(calls: list[AssetCall], rule: ExportRule) -> str | None:
    """The kinds of ops that give fp32."""
    names = {
        op.kind
        for call in calls
        for op in call.ops
        if op.kind != "coreai.constant" and any("xf32" in result for result in op.results)
    }
    return ", ".join(sorted(names)) or None


def selects(calls: list[AssetCall], rule: ExportRule) -> str | None:
    """The kinds of ops that sort or choose."""
    names = {op.kind for call in calls for op in call.ops} & SELECTING
    return ", ".join(sorted(names)) or None


def too_many_tensors(calls: list[AssetCall], rule: ExportRule) -> str | None:
    """The number of inputs, outputs and states of all functions, if it is above the rule's."""
    count = sum(len(call.tensors) for call in calls)
    assert rule.most is not None
    return f"{count}; {rule.most} were seen to work" if count > rule.most else None


def unaligned(calls: list[AssetCall], rule: ExportRule) -> str | None:
    """Last axes of more than 64 that are no multiple of 64 bytes.

    Masks and positions of the contract are narrower, which no port can change.
    """
    wide = {
        tensor for call in calls for tensor in call.tensors
        if call.name.startswith((contract.EXTEND, contract.PROMPT)) and last_axis(tensor) > 64
    }  # fmt: skip
    odd = sorted({size for tensor in wide if (size := last_axis(tensor)) % ALIGNED})
    return f"last axes of {', '.join(map(str, odd))}" if odd else None


def last_axis(tensor: str) -> int:
    """The size of a tensor type's last axis, such as 288 of `tensor<1x1x8x288xf16>`; 1 of a
    number."""
    *sizes, _ = re.split("[<>,]", tensor.partition("tensor")[2])[1].split("x")
    return int(sizes[-1]) if sizes else 1


def linear_int4(calls: list[AssetCall], rule: ExportRule) -> str | None:
    """The number of weights that are int4 with scales."""
    count = sum(
        op.kind == "coreai.blockwise_shift_scale" and "xsi4>" in op.operands[0]
        for op in calls[-1].ops
    )
    return f"{count} weights" if count else None


PREDICATES: dict[str, Callable[[list[AssetCall], ExportRule], str | None]] = {
    "fp32": in_fp32,
    "selection": selects,
    "ports": too_many_tensors,
    "last-axis": unaligned,
    "int4": linear_int4,
}
"""What breaks each rule, by its id. A predicate gives the detail for a warning, or None."""
