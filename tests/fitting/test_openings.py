"""How texts begin: in many ways, and with nothing that is judged."""

from types import SimpleNamespace
from typing import Any

from cetane.fitting.openings import openings, questions
from cetane.gates.probes import texts
from cetane.speculate import bench
from cetane.speculate.bench import suite


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_openings_are_of_many_kinds_and_of_no_judged_text() -> None:
    plain: Any = SimpleNamespace(encode_plain=letters)
    made = ["".join(map(chr, opening)).strip() for opening in openings(plain)]
    assert len(set(made)) == len(made) > 50
    judged = texts()
    assert not [opening for opening in made if opening in judged and len(opening) > 12]


def test_no_question_is_a_prompt_of_the_suite() -> None:
    asked = questions()
    assert len(asked) == len(set(asked)) > 1000
    prompts = {prompt for group in suite().values() for prompt in group}
    assert not prompts & set(asked)
    assert not {turn for talk in bench.conversations() for turn in talk} & set(asked)
