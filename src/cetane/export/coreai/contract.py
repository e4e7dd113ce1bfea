"""The contract: the functions of an asset, and the names and shapes of their tensors.

Sources, all in apple/coreai-models at 86b363d (2026-08-21): `python/src/coreai_models/_constants.py`
and `models/base.py` (class BaseForCausalLMForiOS) for names, shapes, ladder and constraints, and
`swift/.../InferenceEngines/CoreAIStaticShapeEngine.swift` for the host.
"""

from dataclasses import dataclass

from cetane.errors import CetaneError

LOAD, GATHER, EXTEND, PROMPT = "load_embeddings", "gather_embeddings", "extend", "prompt_opt"
TABLE, TOKENS, ROWS = "embedding_table", "in_new_token_ids", "gathered_embeddings"
HIDDEN, POSITIONS, STEP = "transformer_input", "position_ids", "in_step"
MASK, LOGITS = "causal_mask", "out_logits"
KEYS, VALUES = "key_cache", "value_cache"
WIDTHS = (8, 16, 64)
"""Tokens of a call. The host aligns the start of a call down to a multiple of its width."""
SHORTEST = 256
"""The shortest context of a function; each longer one is twice as long."""
LONGEST = 1 << 16
"""Positions are 16-bit."""
INTERLEAVE = 8
"""Channels of a cache that lie side by side, so that the Neural Engine reads them in one step."""


@dataclass(frozen=True)
class Sizes:
    """The sizes that the shapes of the functions follow from."""

    layers: int
    channels: int
    """Channels of one layer's keys: key/value heads times their width."""
    hidden: int
    vocabulary: int

    def states(self, context: int) -> tuple[int, ...]:
        """The shape of each of the two states."""
        return (self.layers, 1, self.channels, 1, context)

    def inputs(self, context: int, width: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the inputs of `extend` and `prompt_opt`, without states."""
        return {
            HIDDEN: (1, width, 1, self.hidden),
            POSITIONS: (1, width),
            STEP: (1,),
            MASK: (1, context, 1, width),
        }


def contexts(longest: int) -> tuple[int, ...]:
    """The contexts of an asset, the longest last.

    Raises CetaneError unless `longest` is 256 times a power of two, as the host's ladder is.
    """
    ladder = [SHORTEST]
    while ladder[-1] < longest:
        ladder.append(2 * ladder[-1])
    if ladder[-1] != longest or longest > LONGEST:
        below = max((c for c in ladder if c < longest), default=SHORTEST)
        raise CetaneError(
            f"cache.context = {longest}: Core AI's host takes contexts of {SHORTEST} times a "
            f"power of two, up to {LONGEST}",
            f"port with cache.context = {min(below, LONGEST)}",
        )
    return tuple(ladder)
