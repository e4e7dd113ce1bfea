"""The planner: it resolves a recipe against a checkpoint into shards, functions and calls."""

from cetane.planner.as_asked import as_recipe_asks, can_rotate
from cetane.planner.calls import BlockCall
from cetane.planner.encoding import Encoder
from cetane.planner.graphs import FunctionGraph, GraphMaker
from cetane.planner.layout import Segment, by_layer, chunk_bounds
from cetane.planner.memory import CachePlan
from cetane.planner.planner import Planner, Programs
from cetane.planner.tags import tags
from cetane.planner.weights import ModelSource

__all__ = [
    "BlockCall",
    "CachePlan",
    "Encoder",
    "FunctionGraph",
    "GraphMaker",
    "ModelSource",
    "Planner",
    "Programs",
    "Segment",
    "as_recipe_asks",
    "by_layer",
    "can_rotate",
    "chunk_bounds",
    "tags",
]
