"""How texts begin: of many kinds, and nothing that is judged."""

from types import SimpleNamespace
from typing import Any

from cetane.fitting.openings import asked_questions, openings, questions
from cetane.gates.probes import QUESTIONS, texts
from cetane.speculate import bench
from cetane.speculate.bench import suite
from cetane.sweeps.smoke import load_prompts


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_openings_are_of_many_kinds_and_of_no_judged_text() -> None:
    plain: Any = SimpleNamespace(encode_plain=letters)
    made = ["".join(map(chr, opening)).strip() for opening in openings(plain)]
    assert len(set(made)) == len(made) > 50
    judged = texts()
    assert not [opening for opening in made if opening in judged and len(opening) > 12]


def test_a_model_with_a_template_is_asked_too() -> None:
    chats: Any = SimpleNamespace(
        has_chat_template=True, chat=lambda messages: [1, *letters(messages[0]["content"]), 2]
    )
    assert asked_questions(chats) == [[1, *letters(question), 2] for question in questions()]
    assert asked_questions(SimpleNamespace(has_chat_template=False)) == []  # type: ignore[arg-type]


def test_no_question_is_judged() -> None:
    """Neither the speculative suite's, nor a gate's; of the smoke test's not even the subject."""
    asked = questions()
    assert len(asked) == len(set(asked)) > 1000
    prompts = {prompt for group in suite().values() for prompt in group}
    prompts |= {turn for talk in bench.conversations() for turn in talk} | {*QUESTIONS}
    assert not prompts & set(asked)
    subjects = {prompt.id for prompt in load_prompts()} | {"france", "paris"}
    assert not [text for text in asked for subject in subjects if subject in text.lower()]
