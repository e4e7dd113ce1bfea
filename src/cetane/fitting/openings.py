"""Openings of the texts and conversations that a model writes itself."""

from __future__ import annotations

import random
import tomllib
from importlib import resources

from cetane.checkpoint import Tokenizer


def openings(tokenizer: Tokenizer) -> list[list[int]]:
    """How texts of many kinds begin, in tokens.

    Small models seldom begin a story, a letter or code themselves. With these openings in half of
    the sequences, SmolLM2's KL in three bits fell from 0.331 to 0.299 on prose that was not read.
    """
    file = resources.files("cetane") / "data" / "texts" / "openings.toml"
    groups = tomllib.loads(file.read_text("utf-8")).values()
    return [tokenizer.encode_plain(opening) for group in groups for opening in group]


def questions() -> list[str]:
    """All questions, in an order that does not change."""
    path = resources.files("cetane") / "data/prompts/questions.toml"
    groups = tomllib.loads(path.read_text(encoding="utf-8")).values()
    made = [template.format(subject) for group in groups
            for template in group["templates"] for subject in group["subjects"]]  # fmt: skip
    random.Random(0).shuffle(made)
    return made
