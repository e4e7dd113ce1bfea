"""The limits of all gates, read from `limits.toml`."""

from functools import cache
from typing import Literal

from pydantic import Field

from cetane.files import json_sha256, shipped_text
from cetane.schema.recipe import Quality
from cetane.validation import Data, parse_toml, validated

OTHER_LIMITS = "judged by other limits than those of this cetane"
Share = float
"""A part of a whole, from 0 to 1."""
DraftHeadArithmetic = Literal["fp16", "fp32"]


class StructureLimits(Data):
    """Limits for programs on the checkpoint's own values, in fp32."""

    relative: float = Field(gt=0)
    one_logit: float = Field(gt=0)
    """The error of any logit, over the root mean square of its row."""
    tie: float = Field(gt=0)


class RoundingLimits(Data):
    """Limits for programs in a narrower arithmetic, against themselves in fp32."""

    hidden_cosine: float
    logit_cosine: float
    kl: float
    other_experts: Share


class HalfLimits(RoundingLimits):
    """Limits for fp16."""

    other_choices: int = Field(ge=0)
    """The most decided tokens for which a head that gives only choices gives another one."""
    text_kl: float
    """The KL on text, where tokens have more keys than at the start of a prompt."""


class EvidenceLimits(Data):
    """The amount of judged text, in tokens, and the figures by which a share is decided."""

    positions: int
    most: int
    margin: float
    confidence: float


class QualityLimits(Data):
    """Limits for the compression, for one quality that a recipe can promise."""

    kl: float
    perplexity_ratio: float
    top1: Share
    greedy: Share
    best: Share


class DraftHeadLimits(Data):
    """Limits for a draft head's shard, against the torch draft head."""

    logit_cosine: float
    top1: Share
    one_logit: float = Field(gt=0)
    """The error of any logit, over the root mean square of its row."""


class PublishedLimits(Data):
    """The limit of the published ports' validator (`gates/layers.py`)."""

    cosine: float


class ActivationLimits(Data):
    """Limits for a bundle with 8-bit activations."""

    cosine: float


class ResidencyLimits(Data):
    """Limits for the places of ops and weights."""

    severities: tuple[str, ...]
    weights_off_ane: Share
    against_rules: Share


class Limits(Data):
    """The limits of all gates; `limits.toml` gives the reasons."""

    structure: StructureLimits
    fp16: HalfLimits
    ane: RoundingLimits
    evidence: EvidenceLimits
    quality: dict[Quality, QualityLimits]
    draft_head: dict[DraftHeadArithmetic, DraftHeadLimits]
    published: PublishedLimits
    activations: ActivationLimits
    residency: ResidencyLimits


def limits() -> Limits:
    """The limits that come with cetane."""
    return read()


def limits_digest() -> str:
    """The hash of all limits. A stored verdict has that of the limits that judged it."""
    return json_sha256(limits().model_dump(mode="json"))


@cache
def read() -> Limits:
    text = shipped_text("gates/limits.toml")
    return validated(Limits, parse_toml(text, "limits.toml"), "limits.toml")
