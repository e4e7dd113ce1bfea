"""The forms in which weights lie, and those that this processor reads."""

from __future__ import annotations

from enum import IntEnum

from cetane.mil.fast.emit import FEATURES, WIDE

ROWS = 4
"""Rows that a product computes at once. Their first blocks lie side by side, then their second
ones, and so on: memory is read in order. Rows of zeros fill the last ones."""


class Form(IntEnum):
    """The forms of a weight `(N, K)`."""

    FLOATS = 0
    """float32."""
    BYTES = 1
    """int8."""
    SCALED_BYTES = 2
    """int8, with a float32 scale for each block; scales lie as blocks do."""
    NIBBLES = 3
    """Indices of 4 bits into a palette of 16 numbers (see `weights.in_nibbles` and `in_tiles`)."""
    HALVES = 4
    """float16."""
    SIXES = 5
    """Indices of 6 bits into a palette of 64 words. They lie only in tiles."""

    def bytes_of(self, weights: int) -> int:
        """The bytes of so many weights; they are whole blocks."""
        bits = {Form.FLOATS: 32, Form.HALVES: 16, Form.NIBBLES: 4, Form.SIXES: 6}.get(self, 8)
        return weights * bits // 8


VNNI = WIDE and bool(FEATURES.get("avx512bw") and FEATURES.get("avx512vnni"))
"""Whether this processor multiplies words in pairs and adds both products at once."""
DOTTED = {Form.BYTES, Form.SCALED_BYTES, Form.NIBBLES, Form.SIXES} if VNNI else set[Form]()
"""The forms whose products are those of `dots`. They lie in tiles, see `weights.in_tiles`."""
READABLE = DOTTED | {Form.FLOATS, Form.BYTES, Form.SCALED_BYTES, Form.HALVES}
"""The forms that this processor reads. The others need instructions that look up a palette."""
if FEATURES.get("avx2"):
    READABLE.add(Form.NIBBLES)
FLOATING = READABLE - DOTTED
"""The forms whose weights become floats."""

ENTRIES = {Form.NIBBLES: 16, Form.SIXES: 64}
"""Entries of a palette; a smaller one is filled with zeros."""
PALETTE_BYTES = 4 * ENTRIES[Form.NIBBLES]
"""Bytes of a palette of floats."""
