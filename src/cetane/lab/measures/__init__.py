"""What an experiment can measure: thin functions over the other rooms, found by their names.

`kind` says how a figure came about. Measured means that it was taken here, on this machine; speeds
are then those of the portable backend. What would need an ANE is predicted.
"""

from cetane.lab.measures import accuracy, activations, ane, drafting, speed, structure

__all__ = ["accuracy", "activations", "ane", "drafting", "speed", "structure"]
