"""Measuring a bundle with coremltools alone.

These modules also go into a kit, which runs on a Mac that has no cetane. So they import only the
standard library, numpy, coremltools and each other.
"""

from typing import Any

Json = dict[str, Any]
"""A JSON object."""
