"""The 1 MiB notch: weights that an M4's ANE streams at 40 % of its speed.

Each of 16 cores reads `ceil(N / 16) * D * bytes` of a weight `(N, D)`. A multiple of 1 MiB, within
16 KiB, streams at 17 to 19 GB/s; other sizes stream at 45 to 60 (eiln.github.io/posts/ane-dma.html,
as quoted in kasper0406/stablehlo-coreml #110, 2026-09-12). This was measured in fp16; for narrower
weights the formula is a guess.
"""

CORES = 16
NOTCH = 1 << 20  # bytes
MARGIN = 16 << 10  # bytes


def on_notch(outputs: int, contracted: int, bits: int) -> bool:
    """Whether a weight `(outputs, contracted)` with elements of `bits` bits is on the notch."""
    payload = -(-outputs // CORES) * contracted * bits // 8
    beside = payload % NOTCH
    return payload >= NOTCH - MARGIN and min(beside, NOTCH - beside) <= MARGIN


def cut(outputs: int, contracted: int, bits: int) -> int | None:
    """The place to cut the contracted axis so that neither part is on the notch.

    It is the place nearest to the middle, in steps of 32; None if there is none.
    """
    steps = range(32, contracted, 32)
    for at in sorted(steps, key=lambda at: abs(2 * at - contracted)):
        if not any(on_notch(outputs, part, bits) for part in (at, contracted - at)):
            return at
    return None
