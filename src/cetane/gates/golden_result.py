"""The outcome of the golden gate."""

from pydantic import Field

from cetane.gates.lost import LostNumbers
from cetane.gates.readings import Misread
from cetane.gates.rounding import Rounding
from cetane.gates.scores import LogitScore, ShardScore
from cetane.gates.structure import Deviation
from cetane.gates.verdict import Check
from cetane.gates.weights import WrongWeight
from cetane.hardware import LARGEST_FP16
from cetane.validation import Data

NEAR_LIMIT = LARGEST_FP16 / 2
"""Half of the largest fp16 number: a larger residual stream gets a warning."""


class Range(Data):
    """The residual stream of the truth after a block, over all probes, as the bundle scales it."""

    block: str
    largest: float
    """Largest magnitude of any channel of any token."""


class GoldenResult(Data):
    """The outcome of the golden gate."""

    passed: bool
    source: str = ""
    """The checkpoint's path, URL or hub id; empty in older results."""
    fingerprint: str
    """The checkpoint's fingerprint."""
    checks: tuple[Check, ...]
    shards: tuple[ShardScore, ...]
    """The scores of the port as it ships, on text, in its widest mode."""
    logits: tuple[LogitScore, ...]
    ranges: tuple[Range, ...]
    warnings: tuple[str, ...]
    greedy: tuple[float, ...]
    """For each chat prompt, the share of generated tokens that are the model's choice too, or at
    most `evidence.margin` nats below it."""
    probes: dict[str, tuple[int, ...]]
    """The tokens of every probe and window of text, by name."""
    greedy_tokens: int
    """The number of tokens generated after each chat prompt."""
    wrong_weights: tuple[WrongWeight, ...] = ()
    unused: tuple[str, ...] = ()
    """Parameters that the port does not use fully."""
    misread: tuple[Misread, ...] = ()
    """Epsilons, activations and rotary tables that the model does not have, and keys and values
    that are not rounded for their caches."""
    structure: tuple[Deviation, ...] = ()
    rounding: tuple[Rounding, ...] = ()
    ane: tuple[Rounding, ...] = ()
    """The loss of the modes in an ANE's arithmetic, late in the context."""
    activations: tuple[Rounding, ...] = ()
    """The loss of the modes by activations of 8 bits, on text and on starts of prompts; none if the
    port has no such activations. What caches of 8 bits cost is in it."""
    twin_kl: float = 0.0
    """The mean KL of the port from its twin, on text, in nats: the loss by compression alone."""
    cache_kl: float = 0.0
    """The part of `twin_kl` that caches of 8 bits cost: the mean KL of the port from itself with
    unrounded caches. What activations of 8 bits cost is in it."""
    lost: LostNumbers | None = None
    """Where infinity or NaN first comes from, if a question met one."""
    positions: int = 0
    """The positions of text that judged the compression."""
    loader: str = ""
    """The loader that read the reference's weights."""
    limits: str = ""
    """The digest of the limits (`limits_digest`); empty in older results."""
    adapters: dict[str, "GoldenResult"] = Field(
        default_factory=dict, exclude_if=lambda adapters: not adapters
    )
    """By adapter, the bundle with it, against the base with the adapter merged. `checks` repeats
    their checks, with the adapter's name in front."""
