"""The settings of a server, with its limits."""

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from cetane.validation import Data

ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#@\sA-Z]+")
"""Origins as browsers send them, without a path; `null` is that of a page from a file, and `*`
stands for all."""


def is_origin(text: str) -> str:
    """The text itself. Raises ValueError for one that equals no browser's origin."""
    if not ORIGIN.fullmatch(text):
        raise ValueError(f"{text!r} is no origin, such as http://localhost:3000")
    return text


class Settings(Data):
    """What a server allows its clients. The command's options have the same names."""

    queue: int = Field(default=64, ge=0)
    """Requests that may wait for a model. Beyond that, the answer is 429."""
    seconds: float = Field(default=600, gt=0)
    """The longest time of a request, in seconds, its wait included."""
    max_tokens: int | None = Field(default=None, ge=1)
    """The most tokens of an answer; None for the rest of the context."""
    choices: int = Field(default=16, ge=1)
    """The most answers to one prompt: `n`."""
    prompts: int = Field(default=256, ge=1)
    """The most prompts of a request for completions."""
    body_bytes: int = Field(default=4 << 20, ge=1)
    """The largest body of a request, in bytes."""
    body_seconds: float = Field(default=30, gt=0)
    """The longest time in which a client sends a body, in seconds."""
    grace: float = Field(default=10, ge=0, allow_inf_nan=False)
    """Seconds that answers have to end when the server is stopped."""
    prefixes: int = Field(default=4, ge=0)
    """Sessions that are kept for prompts with a known start, each with its caches."""
    speculation: bool = True
    """Whether drafts may speed up answers where that pays: from the text itself, from earlier
    answers, and from a draft head or else the model itself."""
    api_key: str | None = Field(default=None, min_length=1, repr=False)
    """The key that clients must send; None for no key."""
    origins: tuple[Annotated[str, AfterValidator(is_origin)], ...] = ()
    """Origins of web pages that may call the server from a browser (CORS)."""
    hosts: tuple[str, ...] = ()
    """Names under which clients may address the server; any if empty. This stops web pages that
    point a name of their own at the server's address (DNS rebinding)."""
