"""Engines of the engine's own tests."""

from tests.engine.conftest import checkpoint, model, tiny_engine, zaya, zaya_engine

__all__ = ["checkpoint", "model", "tiny_engine", "zaya", "zaya_engine"]
