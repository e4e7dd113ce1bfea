"""Run a Core ML program fast, on onnxruntime.

    program = FastProgram(load("model.mlpackage"))
    decode = program.function("decode")
    state = decode.make_state()
    outputs = decode({"hidden": hidden, ...}, state)

Calls mean the same as those of the reference, `Function.compile("fp32")`, which runs what this
cannot: `unsupported` lists the ops that a function would need.
"""

from cetane.mil.fast.functions import ArrayState, FastFunction, FastProgram
from cetane.mil.fast.sessions import share_threads
from cetane.mil.fast.translate import unsupported

__all__ = ["ArrayState", "FastFunction", "FastProgram", "share_threads", "unsupported"]
