"""The limits of all gates, from one file."""

from functools import cache
from importlib import resources
from typing import Literal

from pydantic import Field

from cetane.schema.recipe import Quality
from cetane.validation import Data, parse_toml, validated

Share = float
Arithmetic = Literal["fp16", "fp32"]


class RoutedLimits(Data):
    """The same where tokens choose experts, and rounding may decide a choice."""

    tie: float = Field(gt=0)
    relative: float = Field(gt=0)
    share: Share = Field(gt=0.5, le=1)


class StructureLimits(Data):
    """Programs on the checkpoint's own values, in fp32."""

    relative: float = Field(gt=0)
    routed: RoutedLimits


class Fp16Limits(Data):
    """Programs rounded to fp16, against themselves in fp32."""

    hidden_cosine: float
    logit_cosine: float
    kl: float


class EvidenceLimits(Data):
    """How much is judged, and when a share is decided."""

    positions: int
    most: int
    margin: float
    confidence: float


class QualityLimits(Data):
    """What a recipe promises of its compression."""

    kl: float
    perplexity_ratio: float
    top1: Share
    greedy: Share
    best: Share


class DraftHeadLimits(Data):
    """A draft head's shard against its torch head."""

    logit_cosine: float
    top1: Share


class PublishedLimits(Data):
    """The validator of the published ports."""

    cosine: float


class ActivationLimits(Data):
    """A bundle with activations of 8 bits."""

    hidden_cosine: float


class ResidencyLimits(Data):
    """Where ops may run."""

    severities: tuple[str, ...]
    weights_off_ane: Share


class Limits(Data):
    """Everything that the gates ask; `limits.toml` gives the reasons."""

    structure: StructureLimits
    fp16: Fp16Limits
    evidence: EvidenceLimits
    quality: dict[Quality, QualityLimits]
    draft_head: dict[Arithmetic, DraftHeadLimits]
    published: PublishedLimits
    activations: ActivationLimits
    residency: ResidencyLimits


def limits() -> Limits:
    """The limits that come with cetane."""
    return read()


@cache
def read() -> Limits:
    text = resources.files("cetane.gates").joinpath("limits.toml").read_text()
    return validated(Limits, parse_toml(text, "limits.toml"), "limits.toml")
