"""A recipe resolved against a checkpoint: which blocks go into which function of which shard."""

from cetane.planner.planner import Graph, Planner, Programs, Segment, Source

__all__ = ["Graph", "Planner", "Programs", "Segment", "Source"]
