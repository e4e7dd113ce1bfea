"""A stand-in for coremltools on a Mac: it starts in no time, and fails where the environment says.

`FAULTS` holds `A/SHARD=FAULT`, separated by commas. A fault is `hang`, `die`, `nan`, `refuse`, or
`hang-chain` (only where the whole bundle is open).
"""

import enum

from . import models

__all__ = ["ComputeUnit", "models"]
ComputeUnit = enum.Enum("ComputeUnit", ["CPU_AND_NE", "ALL", "CPU_ONLY", "CPU_AND_GPU"])
