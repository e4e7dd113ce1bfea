"""The fuzzer of Core ML packages: small good ones, damaged, and everything that reads programs."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tests.fuzz.fuzzer import Files, Fuzzer

from cetane.errors import CetaneError
from cetane.mil import load
from cetane.mil.fast.compiled import compile_loop
from cetane.mil.inputs import random_inputs
from cetane.mil.program import Program
from cetane.mil.proto import model_message

MANIFEST = """{"fileFormatVersion": "1.0.0", "rootModelIdentifier": "a", "itemInfoEntries": {"a": {
"author": "x", "description": "x", "name": "m", "path": "com.apple.CoreML/model.mlmodel"}}}"""
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


SPECIFICATION = "model.mlpackage/Data/com.apple.CoreML/model.mlmodel"
WEIGHTS = "model.mlpackage/Data/com.apple.CoreML/weights/weight.bin"


def make_seeds(folder: Path) -> list[Files]:
    """Small good packages, of the kinds of op that ported models have, and of loops."""
    from tests.mil.conftest import mb, save_program, types

    draw = np.random.default_rng(0)

    def half(*shape: int) -> Any:
        return draw.standard_normal(shape).astype(np.float16)

    def pieces(x: Any) -> Any:
        parts = mb.split(x=mb.add(x=x, y=half(12)), split_sizes=[4, 8], axis=0)
        return mb.concat(values=[mb.softmax(x=part) for part in parts], axis=0)

    def layer(x: Any, past: Any) -> Any:
        norm = mb.layer_norm(
            x=mb.concat(values=[x, mb.mul(x=x, y=np.float16(-1))], axis=1), axes=[1],
            epsilon=np.float16(1e-5),
        )  # fmt: skip
        norm = mb.slice_by_index(x=norm, begin=[0, 0, 0, 0], end=[1, 8, 1, 3])
        weights = (
            mb.constexpr_lut_to_dense(
                indices=draw.integers(0, 16, (8, 8, 1, 1)).astype(types.np_uint4_dtype),
                lut=half(1, 1, 1, 1, 16, 1),
            ),
            mb.constexpr_blockwise_shift_scale(
                data=draw.integers(-8, 8, (8, 8, 1, 1)).astype(np.int8), scale=half(8, 1, 1, 1)
            ),
        )
        query, key = (mb.conv(x=norm, weight=w, pad_type="valid") for w in weights)
        rows = mb.transpose(x=mb.reshape(x=query, shape=[1, 2, 4, 3]), perm=[0, 1, 3, 2])
        cache = mb.slice_by_index(x=past, begin=[0, 0, 0, 0], end=[1, 2, 4, 5])
        keys = mb.concat(values=[cache, mb.reshape(x=key, shape=[1, 2, 4, 3])], axis=-1)
        scores = mb.softmax(x=mb.matmul(x=rows, y=keys), axis=-1)
        mixed = mb.matmul(x=scores, y=keys, transpose_y=True)
        turned = mb.transpose(x=mixed, perm=[0, 1, 3, 2])
        return mb.silu(x=mb.reshape(x=turned, shape=[1, 8, 1, 3]))

    def stateful(x: Any, cache: Any) -> Any:
        before = mb.read_state(input=cache)
        after = mb.slice_update(x=before, update=x, begin=[1, 0], end=[2, 4])
        mb.coreml_update_state(state=cache, value=after)
        hit = mb.one_hot(indices=mb.reduce_argmax(x=after, axis=1), one_hot_vector_size=4)
        spread = mb.tile(x=mb.cast(x=hit, dtype="fp16"), reps=[1, 2])
        return mb.pad(x=mb.gather(x=spread, indices=[2, 0], axis=1), pad=[0, 0, 1, 1])

    def loop(x: Any, n: Any) -> Any:
        end = mb.squeeze(x=n)
        total, _ = mb.while_loop(
            _cond=lambda total, count: mb.less(x=count, y=end),
            _body=lambda total, count: (mb.exp(x=total), mb.add(x=count, y=1)),
            loop_vars=(x, 0),
        )
        positive = mb.greater(x=mb.reduce_sum(x=total, axes=[0], keep_dims=False), y=0.0)
        return mb.cond(pred=positive, _true_fn=lambda: mb.mul(x=total, y=total),
                       _false_fn=lambda: mb.fill(shape=[2], value=0.5))  # fmt: skip

    programs: list[tuple[Any, ...]] = [
        ({"x": ((12,), "fp16")}, pieces),
        ({"x": ((1, 8, 1, 3), "fp16"), "past": ((2, 2, 4, 5), "fp16")}, layer),
        ({"x": ((1, 4), "fp16")}, stateful, {"cache": ((3, 4), "fp16")}),
        ({"x": ((2,), "fp32"), "n": ((1,), "int32")}, loop),
    ]
    made = []
    for index, program in enumerate(programs):
        place = folder / str(index)
        place.mkdir()
        data = save_program(place, *program) / "Data/com.apple.CoreML"
        weights = data / "weights/weight.bin"
        made.append({
            "model.mlpackage/Manifest.json": MANIFEST.encode(),
            SPECIFICATION: (data / "model.mlmodel").read_bytes(),
            WEIGHTS: weights.read_bytes() if weights.is_file() else b"",
        })  # fmt: skip
    return made


def damaged_specification(content: bytes, draw: random.Random) -> bytes:
    """A specification with some of its messages changed, and some of its bytes now and then."""
    if draw.random() < 0.9:
        spec = model_message().FromString(content)
        for _ in range(draw.choice((1, 1, 1, 2, 4))):
            draw.choice(DAMAGES)(spec, draw)
        content = spec.SerializeToString()
    return _scribbled(content, draw) if draw.random() < 0.15 else content


class Package(Fuzzer):
    @cached_property
    def seeds(self) -> list[Files]:  # type: ignore[override]
        compile_loop()  # 20 seconds on a fresh machine, which no input is to blame for
        folder = self.folder.parent / "seeds"
        folder.mkdir()
        return make_seeds(folder)

    def mutate(self, draw: random.Random) -> Files:
        files = dict(draw.choice(self.seeds))
        files[SPECIFICATION] = damaged_specification(files[SPECIFICATION], draw)
        if draw.random() < 0.1:
            files[WEIGHTS] = _scribbled(files[WEIGHTS], draw)
        if draw.random() < 0.02:
            files["model.mlpackage/Manifest.json"] = _scribbled(MANIFEST.encode(), draw)
        return files

    def check(self, files: Files) -> None:
        """AssertionError for a file outside the package and the folder of an export."""
        self.write(files)
        before = self.listing()
        program = load(self.folder / "model.mlpackage")
        for stage in (audited, run_exactly, run_fast, self.exported, compared):
            with suppress(CetaneError):
                stage(program)
        shutil.rmtree(self.folder / "onnx", ignore_errors=True)
        assert self.listing() == before, "a file outside the folder of the export"

    def listing(self) -> list[str]:
        parent = self.folder.parent
        return sorted(path.name for path in (*parent.iterdir(), *self.folder.iterdir()))

    def exported(self, program: Program) -> None:
        from cetane.mil.fast.onnx_files import export

        (self.folder / "onnx").mkdir(exist_ok=True)
        export(program, self.folder / "onnx", lambda *_: None)


def audited(program: Program) -> None:
    from cetane.gates.residency.audit import audit
    from cetane.gates.residency.target import Target

    audit({"model": program}, Target())


def run_exactly(program: Program) -> None:
    from cetane.mil.executor import Executable

    for function in program.functions.values():
        run = Executable(function, "fp16")
        run(random_inputs(function), run.make_state())


def run_fast(program: Program) -> None:
    from cetane.mil.fast import FastProgram

    for name, function in program.functions.items():
        run = FastProgram(program, pack=True).function(name)
        run(random_inputs(function), run.make_state())


def compared(program: Program) -> None:
    from cetane.mil.compare import Comparer
    from cetane.mil.executor import Executable

    for function in program.functions.values():
        run = Executable(function)
        Comparer(run, run)(random_inputs(function))


# Damage to a specification, of one kind each.


def _functions(spec: Any) -> list[Any]:
    return [spec.mlProgram.functions[name] for name in sorted(spec.mlProgram.functions)]


def _bodies(spec: Any) -> list[Any]:
    bodies = [f.block_specializations[f.opset] for f in _functions(spec) if f.opset]
    for body in bodies:
        for op in body.operations:
            bodies.extend(op.blocks)
    return bodies


def _ops(spec: Any) -> list[Any]:
    return [op for body in _bodies(spec) for op in body.operations]


def _op(spec: Any, draw: random.Random) -> Any:
    ops = _ops(spec)
    return draw.choice(ops) if ops else None


def _attributes(spec: Any, field: str) -> list[Any]:
    values = [value for op in _ops(spec) for value in op.attributes.values()]
    return [value for value in values if value.HasField(field)]


def _names(spec: Any) -> list[str]:
    names = [named.name for function in _functions(spec) for named in function.inputs]
    return [*names, *(named.name for op in _ops(spec) for named in op.outputs), "absent"]


def _rename_reference(spec: Any, draw: random.Random) -> None:
    op = _op(spec, draw)
    if op is not None and op.inputs:
        argument = op.inputs[draw.choice(sorted(op.inputs))]
        for binding in argument.arguments[:1]:
            binding.name = draw.choice(_names(spec))


def _drop_or_add_input(spec: Any, draw: random.Random) -> None:
    op, other = _op(spec, draw), _op(spec, draw)
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


def _ops_moved(spec: Any, draw: random.Random) -> None:
    bodies = [body for body in _bodies(spec) if body.operations]
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


def _kind(spec: Any, draw: random.Random) -> None:
    op = _op(spec, draw)
    if op is not None:
        op.type = draw.choice((*KINDS, "", "a b"))


def _literal(spec: Any, draw: random.Random) -> None:
    values = [
        v for op in _ops(spec) for v in op.attributes.values() if v.HasField("immediateValue")
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
        tensor.bytes.values = _scribbled(tensor.bytes.values, draw)
    elif field == "strings" and tensor.strings.values:
        tensor.strings.values[0] = draw.choice((*NAMES, "custom", "int32", "bool"))
    if draw.random() < 0.1:
        tensor.Clear()


def _types(spec: Any) -> list[Any]:
    named = [n for f in _functions(spec) for n in f.inputs]
    named += [n for op in _ops(spec) for n in op.outputs]
    types = [n.type for n in named] + [v.type for op in _ops(spec) for v in op.attributes.values()]
    return types


def _type(spec: Any, draw: random.Random) -> None:
    types = _types(spec)
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


def _everywhere(spec: Any, draw: random.Random) -> None:
    """One size of an input and of every result that has it, so that shapes go on agreeing."""
    sizes = [
        d.constant for t in _types(spec) for d in t.tensorType.dimensions
        if d.WhichOneof("dimension") == "constant"
    ]  # fmt: skip
    if not sizes:
        return
    old, new = draw.choice(sizes).size, draw.choice(SIZES)
    for size in sizes:
        if size.size == old:
            size.size = new


def _place(spec: Any, draw: random.Random) -> None:
    """Where a weight lies."""
    values = _attributes(spec, "blobFileValue")
    if not values:
        return
    blob = draw.choice(values).blobFileValue
    if draw.random() < 0.5:
        blob.offset = draw.choice((0, 1, 63, 64, 128, 192, 2**40, 2**64 - 1))
    else:
        blob.fileName = draw.choice((*NAMES, "@model_path/../../../../etc/passwd"))


def _name(spec: Any, draw: random.Random) -> None:
    name = draw.choice((*NAMES, *_names(spec)))
    functions, ops = spec.mlProgram.functions, _ops(spec)
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
            for named in draw.choice(_functions(spec)).inputs[:1]:
                named.name = name
        case 3:
            bodies = [body for body in _bodies(spec) if body.outputs]
            if bodies:
                draw.choice(bodies).outputs[0] = name
        case _ if ops:
            draw.choice(ops).attributes["name"].immediateValue.tensor.strings.values[:] = [name]


def _nested(spec: Any, draw: random.Random) -> None:
    """A body inside itself, many times."""
    bodies = _bodies(spec)
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


def _interface(spec: Any, draw: random.Random) -> None:
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


def _opset(spec: Any, draw: random.Random) -> None:
    for function in _functions(spec)[:1]:
        function.opset = draw.choice(("", "CoreML9", "CoreML7"))
    if draw.random() < 0.3:
        spec.description.defaultFunctionName = draw.choice(NAMES)


DAMAGES: tuple[Callable[[Any, random.Random], None], ...] = (
    _rename_reference, _rename_reference, _drop_or_add_input, _drop_or_add_input, _ops_moved, _kind,
    _kind, _literal, _literal, _literal, _type, _type, _everywhere, _place, _name, _nested,
    _interface, _opset,
)  # fmt: skip


def _scribbled(data: bytes, draw: random.Random) -> bytes:
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
