"""The fast executor: runs a Core ML program as graphs of onnxruntime, or as tapes (`tape`).

    program = FastProgram(load("model.mlpackage"))
    decode = program.function("decode")
    state = decode.make_state()
    outputs = decode({"hidden": hidden, ...}, state)

Calls mean the same as those of the reference, `mil.Executable(function)`. The reference also runs
functions with ops that the fast executor lacks; `unsupported` lists these ops.
"""

from typing import TYPE_CHECKING, Any

from cetane.mil.fast.sessions import share_threads

if TYPE_CHECKING:
    from cetane.mil.fast.program import FastProgram
    from cetane.mil.fast.translate import unsupported

__all__ = ["FastProgram", "share_threads", "unsupported"]


def __getattr__(name: str) -> Any:
    """Import onnx only to make a graph: it takes a while, and prepared models run without it."""
    if name == "FastProgram":
        from cetane.mil.fast.program import FastProgram

        return FastProgram
    if name == "unsupported":
        from cetane.mil.fast.translate import unsupported

        return unsupported
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
