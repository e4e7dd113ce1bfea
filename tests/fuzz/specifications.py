"""Damage to the specification of a Core ML package: each function changes one kind of thing."""

import random
from collections.abc import Callable
from typing import Any

from cetane.mil.proto import model_message

INTEGERS = (0, 1, -1, 2, 3, 7, -5, 64, 4096, 2**20, 2**31 - 1, -(2**31))
SIZES = (0, 1, 2, 3, 5, 8, 64, 65537, 2**31, 2**40, 2**62, 2**64 - 1)
NAMES = (
    "",
    ".",
    "..",
    "../../escaped",
    "/tmp/escaped",
    "a/b",
    "a\nb",
    "a:b",
    "x" * 300,
    "é",
    "CON",
)
KINDS = (
    "add", "mul", "conv", "matmul", "reshape", "transpose", "slice_by_index", "concat", "split",
    "tile", "fill", "one_hot", "range_1d", "pad", "gather", "scatter_nd", "softmax", "layer_norm",
    "read_state", "write_state", "while_loop", "cond", "cast", "constexpr_lut_to_dense", "topk",
    "upsample_bilinear", "const", "identity", "rms_norm", "view", "fast:view", "linear", "stack",
    "slice_update", "random_normal", "make_list", "squeeze", "expand_dims", "max_pool", "select",
)  # fmt: skip


def damaged_specification(content: bytes, draw: random.Random) -> bytes:
    """A specification with some of its messages changed, and some of its bytes now and then."""
    if draw.random() < 0.9:
        spec = model_message().FromString(content)
        for _ in range(draw.choice((1, 1, 1, 2, 4))):
            draw.choice(DAMAGES)(spec, draw)
        content = spec.SerializeToString()
    return scribbled(content, draw) if draw.random() < 0.15 else content


def functions_of(spec: Any) -> list[Any]:
    return [spec.mlProgram.functions[name] for name in sorted(spec.mlProgram.functions)]


def bodies_of(spec: Any) -> list[Any]:
    bodies = [f.block_specializations[f.opset] for f in functions_of(spec) if f.opset]
    for body in bodies:
        for op in body.operations:
            bodies.extend(op.blocks)
    return bodies


def ops_of(spec: Any) -> list[Any]:
    return [op for body in bodies_of(spec) for op in body.operations]


def some_op(spec: Any, draw: random.Random) -> Any:
    ops = ops_of(spec)
    return draw.choice(ops) if ops else None


def attributes_of(spec: Any, field: str) -> list[Any]:
    values = [value for op in ops_of(spec) for value in op.attributes.values()]
    return [value for value in values if value.HasField(field)]


def names_of(spec: Any) -> list[str]:
    names = [named.name for function in functions_of(spec) for named in function.inputs]
    return [*names, *(named.name for op in ops_of(spec) for named in op.outputs), "absent"]


def types_of(spec: Any) -> list[Any]:
    ops = ops_of(spec)
    named = [n for f in functions_of(spec) for n in f.inputs]
    named += [n for op in ops for n in op.outputs]
    return [n.type for n in named] + [v.type for op in ops for v in op.attributes.values()]


def rename_reference(spec: Any, draw: random.Random) -> None:
    op = some_op(spec, draw)
    if op is not None and op.inputs:
        argument = op.inputs[draw.choice(sorted(op.inputs))]
        for binding in argument.arguments[:1]:
            binding.name = draw.choice(names_of(spec))


def drop_or_add_input(spec: Any, draw: random.Random) -> None:
    op, other = some_op(spec, draw), some_op(spec, draw)
    if op is None:
        return
    if op.inputs and draw.random() < 0.5:
        del op.inputs[draw.choice(sorted(op.inputs))]
    elif op.inputs and draw.random() < 0.3:
        op.inputs[draw.choice(sorted(op.inputs))].Clear()
    elif other.inputs:
        name = draw.choice(sorted(other.inputs))
        copy = other.inputs[name].SerializeToString()
        op.inputs[name].MergeFromString(copy)  # two values where there was one


def move_ops(spec: Any, draw: random.Random) -> None:
    bodies = [body for body in bodies_of(spec) if body.operations]
    if not bodies:
        return
    body = draw.choice(bodies)
    index, other = (draw.randrange(len(body.operations)) for _ in range(2))
    match draw.randrange(4):
        case 0:
            del body.operations[index]
        case 1:
            copy = body.operations[index].SerializeToString()
            body.operations.add().ParseFromString(copy)
        case 2:
            one, two = (body.operations[i].SerializeToString() for i in (index, other))
            body.operations[index].ParseFromString(two)
            body.operations[other].ParseFromString(one)
        case _:
            copy = body.operations[other].SerializeToString()
            body.operations[index].blocks.add().operations.add().ParseFromString(copy)


def change_kind(spec: Any, draw: random.Random) -> None:
    op = some_op(spec, draw)
    if op is not None:
        op.type = draw.choice((*KINDS, "", "a b"))


def change_literal(spec: Any, draw: random.Random) -> None:
    values = [
        v for op in ops_of(spec) for v in op.attributes.values() if v.HasField("immediateValue")
    ]
    if not values:
        return
    tensor = draw.choice(values).immediateValue.tensor
    field = tensor.WhichOneof("value")
    if field == "ints" and tensor.ints.values:
        tensor.ints.values[draw.randrange(len(tensor.ints.values))] = draw.choice(INTEGERS)
    elif field == "bools" and tensor.bools.values:
        tensor.bools.values[0] = not tensor.bools.values[0]
    elif field == "floats" and tensor.floats.values:
        tensor.floats.values[0] = draw.choice((0.0, -1.0, 1e30, float("nan"), float("inf")))
    elif field == "bytes":
        tensor.bytes.values = scribbled(tensor.bytes.values, draw)
    elif field == "strings" and tensor.strings.values:
        tensor.strings.values[0] = draw.choice((*NAMES, "custom", "int32", "bool"))
    if draw.random() < 0.1:
        tensor.Clear()


def change_type(spec: Any, draw: random.Random) -> None:
    types = types_of(spec)
    if not types:
        return
    type_ = draw.choice(types)
    tensor = type_.tensorType
    if type_.WhichOneof("type") == "stateType":
        tensor = type_.stateType.wrappedType.tensorType
    match draw.randrange(5):
        case 0 if tensor.dimensions:
            size = tensor.dimensions[draw.randrange(len(tensor.dimensions))]
            size.constant.size = draw.choice(SIZES)
        case 1 if tensor.dimensions:
            tensor.dimensions[0].unknown.variadic = draw.random() < 0.5
        case 2:
            tensor.dimensions.add().constant.size = draw.choice(SIZES)
        case 3:
            tensor.dataType = draw.choice((0, 1, 2, 10, 11, 12, 21, 23, 24, 31, 35, 39, 99))
        case _:
            type_.ParseFromString(draw.choice(types).SerializeToString())


def resize_everywhere(spec: Any, draw: random.Random) -> None:
    """One size of an input and of every result that has it, so that shapes go on agreeing."""
    sizes = [
        d.constant for t in types_of(spec) for d in t.tensorType.dimensions
        if d.WhichOneof("dimension") == "constant"
    ]  # fmt: skip
    if not sizes:
        return
    old, new = draw.choice(sizes).size, draw.choice(SIZES)
    for size in sizes:
        if size.size == old:
            size.size = new


def move_weight(spec: Any, draw: random.Random) -> None:
    """Where a weight lies."""
    values = attributes_of(spec, "blobFileValue")
    if not values:
        return
    blob = draw.choice(values).blobFileValue
    if draw.random() < 0.5:
        blob.offset = draw.choice((0, 1, 63, 64, 128, 192, 2**40, 2**64 - 1))
    else:
        blob.fileName = draw.choice((*NAMES, "@model_path/../../../../etc/passwd"))


def change_name(spec: Any, draw: random.Random) -> None:
    name = draw.choice((*NAMES, *names_of(spec)))
    functions, ops = spec.mlProgram.functions, ops_of(spec)
    match draw.randrange(5):
        case 0 if functions:
            old = draw.choice(sorted(functions))
            copy = functions[old].SerializeToString()
            del functions[old]
            functions[name].ParseFromString(copy)
        case 1 if ops:
            op = draw.choice(ops)
            for named in op.outputs[:1]:
                named.name = name
        case 2 if functions:
            for named in draw.choice(functions_of(spec)).inputs[:1]:
                named.name = name
        case 3:
            bodies = [body for body in bodies_of(spec) if body.outputs]
            if bodies:
                draw.choice(bodies).outputs[0] = name
        case _ if ops:
            draw.choice(ops).attributes["name"].immediateValue.tensor.strings.values[:] = [name]


def nest_body(spec: Any, draw: random.Random) -> None:
    """A body inside itself, many times."""
    bodies = bodies_of(spec)
    if not bodies or not bodies[0].operations:
        return
    op = bodies[0].operations[draw.randrange(len(bodies[0].operations))]
    for _ in range(draw.choice((1, 2, 20, 40))):
        copy = op.SerializeToString()
        if len(copy) > 200_000:
            return
        inner = op.blocks.add() if not op.blocks else op.blocks[0]
        del inner.operations[:]
        inner.operations.add().ParseFromString(copy)


def change_interface(spec: Any, draw: random.Random) -> None:
    features = [*spec.description.input, *spec.description.output]
    if not features:
        return
    feature = draw.choice(features)
    match draw.randrange(4):
        case 0:
            feature.type.multiArrayType.shape[:] = [draw.choice(SIZES[:-1]) for _ in range(2)]
        case 1:
            sizes = feature.type.multiArrayType.shapeRange.sizeRanges
            for _ in range(draw.choice((1, 2, 4))):
                sizes.add(
                    lowerBound=draw.choice(SIZES[:-1]), upperBound=draw.choice((-1, 4, 2**40))
                )
        case 2:
            shape = feature.type.multiArrayType.enumeratedShapes.shapes.add()
            shape.shape[:] = [draw.choice(SIZES[:-1]) for _ in range(2)]
        case _:
            feature.type.imageType.width = draw.choice((0, 3, 2**40))


def change_opset(spec: Any, draw: random.Random) -> None:
    for function in functions_of(spec)[:1]:
        function.opset = draw.choice(("", "CoreML9", "CoreML7"))
    if draw.random() < 0.3:
        spec.description.defaultFunctionName = draw.choice(NAMES)


DAMAGES: tuple[Callable[[Any, random.Random], None], ...] = (
    rename_reference, rename_reference, drop_or_add_input, drop_or_add_input, move_ops,
    change_kind, change_kind, change_literal, change_literal, change_literal, change_type,
    change_type, resize_everywhere, move_weight, change_name, nest_body, change_interface,
    change_opset,
)  # fmt: skip
"""Some are likelier than others."""


def scribbled(data: bytes, draw: random.Random) -> bytes:
    """Some bytes changed, cut off, or put in."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 2, 8))):
        if changed:
            changed[draw.randrange(len(changed))] = draw.choice((0, 1, 0x7F, 0x80, 0xFF))
    match draw.randrange(6):
        case 0:
            del changed[draw.randrange(len(changed) + 1) :]
        case 1:
            at = draw.randrange(len(changed) + 1)
            changed[at:at] = draw.randbytes(draw.choice((1, 4, 64)))
    return bytes(changed)
