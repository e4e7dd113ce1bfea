"""Measures of an experiment: thin functions over the other rooms, called by name.

`kind` tells how a figure was obtained. *Measured* figures are from this machine, and their speeds
are those of the portable backend. Figures that need an ANE are *predicted*.
"""

from cetane.lab.measures import accuracy, activations, ane, drafting, speed, structure

__all__ = ["accuracy", "activations", "ane", "drafting", "speed", "structure"]
