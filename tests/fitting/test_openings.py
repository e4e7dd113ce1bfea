"""How texts begin: in many ways, and with nothing that is judged."""

import re
import tomllib
from types import SimpleNamespace
from typing import Any

from cetane.files import shipped_text
from cetane.fitting.openings import openings, questions
from cetane.gates.probes import texts
from cetane.prompts import conversations, suite


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_openings_are_of_many_kinds_and_of_no_judged_text() -> None:
    plain: Any = SimpleNamespace(encode_plain=letters)
    made = ["".join(map(chr, opening)).strip() for opening in openings(plain)]
    assert len(set(made)) == len(made) > 50
    judged = texts()
    assert not [opening for opening in made if opening in judged and len(opening) > 12]


def judged_prompts() -> set[str]:
    smoke = tomllib.loads(shipped_text("data/prompts/smoke.toml"))["prompt"]
    suites = {prompt for group in suite().values() for prompt in group}
    talks = {turn for talk in conversations() for turn in talk}
    parts = suites, talks, {prompt["text"] for prompt in smoke}
    assert all(parts)
    return set().union(*parts)


def fours(text: str) -> set[tuple[str, ...]]:
    """The runs of four words, without punctuation and case."""
    words = re.findall(r"\w+", text.lower())
    return set(zip(words, words[1:], words[2:], words[3:], strict=False))


def test_questions_are_many_and_none_is_judged() -> None:
    asked = questions()
    assert len(asked) == len(set(asked)) > 18_000
    assert not judged_prompts() & set(asked)


def test_no_question_is_nearly_judged() -> None:
    """Neither is a text or code within a question: of the runs of four words, few are shared."""
    groups = tomllib.loads(shipped_text("data/prompts/questions.toml")).values()
    parts = [subject for group in groups for subject in group["subjects"]]
    judged = [fours(prompt) for prompt in judged_prompts()]
    common = set[tuple[str, ...]]().union(*judged)
    for text in parts + [question for question in questions() if len(question) < 200]:
        runs = fours(text)
        if runs & common:
            for prompt in judged:
                assert len(runs & prompt) < 0.2 * len(runs | prompt), text
