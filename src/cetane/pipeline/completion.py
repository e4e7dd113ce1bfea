"""A model's answer as data, and the options of an answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from cetane.engine.generate import Ending

FinishReason = Ending | Literal["interrupted"]
"""The reason why an answer ended; `interrupted` is a stream that was closed, or still runs."""


@dataclass(frozen=True)
class Completion:
    """An answer of a model: its text, the reason for its end, and its times."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    """Tokens of the whole prompt, including those already in the cache."""
    seconds_to_first_token: float
    seconds: float
    """Seconds after the first token."""

    @property
    def tokens_per_second(self) -> float | None:
        """The speed after the first token; None for an answer of less than two tokens."""
        more = len(self.tokens) - 1
        return more / self.seconds if more > 0 and self.seconds else None

    def as_json(self) -> dict[str, Any]:
        """The completion as a JSON object."""
        return {
            "text": self.text,
            "tokens": list(self.tokens),
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.prompt_tokens,
            "seconds_to_first_token": self.seconds_to_first_token,
            "tokens_per_second": self.tokens_per_second,
        }


class Sampling(TypedDict, total=False):
    """Options for the choice of tokens; the default is greedy."""

    temperature: float
    """0 is greedy."""
    top_k: int
    """Only the k likeliest tokens; 0 keeps all."""
    top_p: float
    """Only the likeliest tokens that sum to p; 1 keeps all."""
    min_p: float
    """Only tokens at least p times as likely as the likeliest; 0 keeps all."""
    seed: int | None
    """Makes sampling repeatable. The whole prompt runs, even where it continues the last answer."""
    presence_penalty: float
    """Subtracted from the logit of every token that the answer holds, -2 to 2."""
    frequency_penalty: float
    """Subtracted as often as the answer holds the token, -2 to 2."""
    logit_bias: Mapping[int, float]
    """Added to the logits of these tokens."""


@with_config(ConfigDict(extra="forbid"))
class AnswerOptions(Sampling):
    """All options of an answer."""

    max_new_tokens: int
