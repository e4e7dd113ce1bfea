"""The table of instructions for each MIL op.

The first parameter of a function, `w`, is the writer. The annotation of any other decides what it
gets: `Place`, where a value lies; `Places`, several; `Argument`, the argument itself; anything
else, plain Python values. A function raises Unsupported for parameters that no instruction covers.
Annotations are read as text, so each file of ops needs `from __future__ import annotations`.
"""

from cetane.mil.fast.tape.place import Place
from cetane.mil.implementation import Implementations

Places = list[Place]
_PASSING = {
    "Place": "tensor", "Place | None": "tensor", "Places": "tensors", "Argument": "argument",
}  # fmt: skip

INSTRUCTIONS = Implementations(lambda annotation: _PASSING.get(str(annotation), "plain"), ("w",))
enters = INSTRUCTIONS.enters
