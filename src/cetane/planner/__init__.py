"""A recipe resolved against a checkpoint: which blocks go into which function of which shard."""

from cetane.planner.graphs import FunctionGraph, GraphMaker
from cetane.planner.layout import Segment, chunk_bounds
from cetane.planner.memory import CachePlan
from cetane.planner.planner import Planner, Programs
from cetane.planner.tags import tags
from cetane.planner.weights import ModelSource

__all__ = [
    "CachePlan",
    "FunctionGraph",
    "GraphMaker",
    "ModelSource",
    "Planner",
    "Programs",
    "Segment",
    "chunk_bounds",
    "tags",
]
