"""Openings of the texts that a model writes itself: of many kinds, and questions."""

from __future__ import annotations

import random
import tomllib
from importlib import resources

from cetane.checkpoint import Tokenizer
from cetane.gates.probes import asked


def openings(tokenizer: Tokenizer) -> list[list[int]]:
    """How texts of many kinds begin, in tokens.

    Small models seldom begin a story, a letter or code themselves. With these openings in half of
    the sequences, SmolLM2's KL in three bits fell from 0.331 to 0.299 on prose that was not read.
    """
    file = resources.files("cetane") / "data" / "texts" / "openings.toml"
    groups = tomllib.loads(file.read_text("utf-8")).values()
    return [tokenizer.encode_plain(opening) for group in groups for opening in group]


def asked_questions(tokenizer: Tokenizer) -> list[list[int]]:
    """All questions in the model's chat template, in tokens; none without a template."""
    if not tokenizer.has_chat_template:
        return []
    return [asked(tokenizer, question) for question in questions()]


def questions() -> list[str]:
    """All questions, in an order that does not change."""
    path = resources.files("cetane") / "data/prompts/questions.toml"
    groups = tomllib.loads(path.read_text(encoding="utf-8")).values()
    made = [template.format(subject) for group in groups
            for template in group["templates"] for subject in group["subjects"]]  # fmt: skip
    random.Random(0).shuffle(made)
    return made
