"""Compression formats as pairs of encode and decode on arrays, and rules that choose between
them."""

from cetane.compress.formats import Format, Fp16, Linear, Palette, parse_format
from cetane.compress.selection import AUTO, Selection, patterns
from cetane.compress.sensitivity import Sensitivities, SensitivityFile

__all__ = [
    "AUTO",
    "Format",
    "Fp16",
    "Linear",
    "Palette",
    "Selection",
    "Sensitivities",
    "SensitivityFile",
    "parse_format",
    "patterns",
]
