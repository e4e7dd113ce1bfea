"""Compression formats as encode/decode pairs on arrays, and the rules that choose between them."""

from cetane.compress.encoded import Affine, Dense, Encoded, Palettized
from cetane.compress.formats import Format, Fp16, Linear, Palette, parse_format
from cetane.compress.select import AUTO, Selection, pattern
from cetane.compress.sensitivity import Sensitivities, SensitivityFile

__all__ = [
    "AUTO",
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
    "pattern",
]
