"""Compression formats as pairs of encode and decode on arrays, and rules that choose between
them."""

from cetane.compress.encoded import Affine, Dense, Encoded, Palettized
from cetane.compress.formats import Format, Fp16, Linear, Palette, parse_format
from cetane.compress.select import Selection
from cetane.compress.sensitivity import Sensitivities, SensitivityFile

__all__ = [
    "Affine",
    "Dense",
    "Encoded",
    "Format",
    "Fp16",
    "Linear",
    "Palette",
    "Palettized",
    "Selection",
    "Sensitivities",
    "SensitivityFile",
    "parse_format",
]
