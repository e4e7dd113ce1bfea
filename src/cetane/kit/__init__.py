"""Kits: what goes to a Mac, and what comes back from it.

`write.py` makes the folder that measures itself there (`cetane.measuring`, with the bundle's
packages, inputs and expected outputs). The other modules read what came back.
"""
