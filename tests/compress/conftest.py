"""Loads the kernels, or compiles them, before hypothesis measures how long a test takes."""

from cetane.compress import clusters, kernels  # noqa: F401
