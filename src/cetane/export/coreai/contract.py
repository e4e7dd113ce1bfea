"""The contract: the functions of an asset, and the names and shapes of their tensors.

Sources, all in apple/coreai-models at 86b363d (2026-08-21): in `python/src/coreai_models`,
`_constants.py` and `models/base.py` (class BaseForCausalLMForiOS) for names, shapes, ladder and
constraints; `swift/.../InferenceEngines/CoreAIStaticShapeEngine.swift` for the host.
"""

from dataclasses import dataclass

from cetane.errors import CetaneError

LOAD, GATHER, EXTEND, PROMPT = "load_embeddings", "gather_embeddings", "extend", "prompt_opt"
TABLE, TOKENS, ROWS = "embedding_table", "in_new_token_ids", "gathered_embeddings"
HIDDEN, POSITIONS, STEP = "transformer_input", "position_ids", "in_step"
MASK, LOGITS = "causal_mask", "out_logits"
KEYS, VALUES = "key_cache", "value_cache"
WIDTHS = {EXTEND: (8, 64), PROMPT: (64,)}
"""Tokens of a call. The host aligns the start of a call down to a multiple of its width. It calls
`prompt_opt` only while more than 64 tokens are left. Apple's first exports also had 16 tokens, and
`prompt_opt` of 8. Later exports leave these out, since a Neural Engine program holds only so many
inputs and outputs (models/gemma4/export.py at 40b9664)."""
SHORTEST, STEP_UP = 256, 4
"""The shortest context of a function, and the ratio of two contexts. Apple's ladder had the ratio
2, until it was too long for a program; for Gemma 4 it is 4 to 8."""
LONGEST = 1 << 16
"""The longest context: positions are 16-bit."""
INTERLEAVE = 8
"""Channels of a cache that lie side by side, so that the Neural Engine reads them in one step."""
ROW_INTERLEAVE = 8
"""Rows of the embedding's table that lie side by side. It has whole groups of them."""


@dataclass(frozen=True)
class Sizes:
    """The sizes that decide the shapes of all functions."""

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

    Raises CetaneError unless `longest` is a power of two from 256 to 65536: the last call of a
    context must be as wide as any other, and positions are 16-bit.
    """
    if not SHORTEST <= longest <= LONGEST or longest & (longest - 1):
        below = min(max(SHORTEST, 1 << (longest.bit_length() - 1)), LONGEST)
        raise CetaneError(
            f"cache.context = {longest}: Core AI's contract has contexts of a power of two from "
            f"{SHORTEST} to {LONGEST}",
            f"port with cache.context = {below}",
        )
    ladder = [longest]
    while ladder[-1] >= STEP_UP * SHORTEST:
        ladder.append(ladder[-1] // STEP_UP)
    return tuple(reversed(ladder))


def call_name(kind: str, context: int, width: int) -> str:
    """The name of `extend` or `prompt_opt` for a context and a number of tokens."""
    return f"{kind}_{context}_{width}"


def gather_name(width: int) -> str:
    """The name of the function that looks up `width` tokens."""
    return f"{GATHER}_{width}"
