"""The folder that Apple's Core AI runner loads: the static contract, for the Neural Engine.

It is the second target of the same planner and families. Blocks are traced behind the inputs,
outputs and states of their contract, and their weights become the constants of their format.
Apple's runtime also runs the asset without a Mac, on the CPU, so it judges what we author.
"""

from cetane.export.coreai.contract import contexts
from cetane.export.coreai.folder import COMPILE, export
from cetane.export.coreai.runner import AssetRunner

__all__ = ["COMPILE", "AssetRunner", "contexts", "export"]
