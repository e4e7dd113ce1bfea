"""The forms in which weights lie, and those that this processor reads."""

from __future__ import annotations

from enum import IntEnum

from cetane.mil.fast.emit import FEATURES, WIDE

ROWS = 4
"""Rows that a product computes at once. Their first blocks lie side by side, then their second
ones, and so on: memory is read in order. Rows of zeros fill the last ones."""


class WeightForm(IntEnum):
    """How a weight `(N, K)` lies in memory."""

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
        bits = {
            WeightForm.FLOATS: 32, WeightForm.HALVES: 16, WeightForm.NIBBLES: 4, WeightForm.SIXES: 6
        }.get(self, 8)  # fmt: skip
        return weights * bits // 8


VNNI = WIDE and bool(FEATURES.get("avx512bw") and FEATURES.get("avx512vnni"))
"""Whether this processor multiplies words in pairs and adds both products at once."""
DOTTED = (
    {WeightForm.BYTES, WeightForm.SCALED_BYTES, WeightForm.NIBBLES, WeightForm.SIXES}
    if VNNI
    else set[WeightForm]()
)
"""The forms whose products are those of `dots`. They lie in tiles, see `weights.in_tiles`."""
READABLE = DOTTED | {
    WeightForm.FLOATS, WeightForm.BYTES, WeightForm.SCALED_BYTES, WeightForm.HALVES
}  # fmt: skip
"""The forms that this processor reads. The others need instructions that look up a palette."""
if FEATURES.get("avx2"):
    READABLE.add(WeightForm.NIBBLES)
FLOATING = READABLE - DOTTED
"""The forms whose weights become floats."""

ENTRIES = {WeightForm.NIBBLES: 16, WeightForm.SIXES: 64}
"""Entries of a palette; a smaller one is filled with zeros."""
PALETTE_BYTES = 4 * ENTRIES[WeightForm.NIBBLES]
"""Bytes of a palette of floats."""
