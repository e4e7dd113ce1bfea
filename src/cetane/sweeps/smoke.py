"""The smoke test: three prompts with greedy answers, for a reader to see if they make sense."""

import tomllib
from collections.abc import Sequence
from functools import cache

from pydantic import Field

from cetane.checkpoint import Tokenizer
from cetane.engine.prefixes import common_start
from cetane.files import shipped_text
from cetane.gates.compressions import Judge
from cetane.gates.probes import asked
from cetane.sweeps.points import Answer
from cetane.validation import Data

LENGTH = 24
"""The number of tokens of an answer."""


class Prompt(Data):
    """A prompt of `data/prompts/smoke.toml`."""

    id: str
    text: str
    expect: tuple[str, ...] = Field(default=())

    def answered(self, text: str) -> bool | None:
        """Whether a text has one of the expected words; None if no word is expected."""
        if not self.expect:
            return None
        return any(word.lower() in text.lower() for word in self.expect)


@cache
def load_prompts() -> tuple[Prompt, ...]:
    """The prompts that ship."""
    content = tomllib.loads(shipped_text("data/prompts/smoke.toml"))
    return tuple(Prompt.model_validate(prompt) for prompt in content["prompt"])


def ask(judge: Judge) -> list[list[int]]:
    """The model's answer to every prompt."""
    tokenizer = judge.checkpoint.tokenizer
    room = judge.planner.recipe.cache.context
    answers = []
    for prompt in load_prompts():
        tokens = asked(tokenizer, prompt.text)
        length = min(LENGTH, room - len(tokens))
        answers.append(judge.answer(tokens, length) if length > 0 else [])
    return answers


def compare(
    tokenizer: Tokenizer, answers: Sequence[Sequence[int]], truth: Sequence[Sequence[int]]
) -> tuple[Answer, ...]:
    """The answers, compared with those of the fp16 weights."""
    made = []
    for prompt, mine, theirs in zip(load_prompts(), answers, truth, strict=True):
        text = tokenizer.decode(mine)
        same = common_start(mine, theirs)
        made.append(Answer(id=prompt.id, text=text, same=same, expected=prompt.answered(text)))
    return tuple(made)
