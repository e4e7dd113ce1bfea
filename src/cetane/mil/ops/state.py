"""Reading and writing states.

Files never have coremltools' `coreml_update_state`: it is written as `write_state`, then as
`read_state` where its result is used.
"""

from torch import Tensor

from cetane.mil.ops.registry import StateCell, op


@op("read_state")
def read_state(input: StateCell) -> Tensor:
    return input.read()


@op("write_state")
def write_state(input: StateCell, data: Tensor) -> None:
    input.write(data)
