"""Measures of an experiment: thin functions over the other rooms, called by name.

`kind` tells how a figure was obtained. *Measured* figures are from this machine, on the backend
that its users get, or from a device whose record was imported. Other figures that need an ANE are
*predicted*.
"""

from cetane.lab.measures import (
    accuracy,
    activations,
    ane,
    attention,
    device,
    drafting,
    masks,
    recall,
    speed,
)

__all__ = [
    "accuracy", "activations", "ane", "attention", "device", "drafting", "masks", "recall", "speed",
]  # fmt: skip
