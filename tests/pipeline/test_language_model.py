"""Prompts that a stranger's tokenizer and template make long or slow."""

import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers

from cetane.bundle import Bundle
from cetane.errors import CetaneError
from cetane.pipeline.language_model import LanguageModel
from cetane.speculate.open import DrafterOptions

QUADRATIC = tokenizers.pre_tokenizers.Split(tokenizers.Regex("x.*y"), "isolated")
"""It reads a text of x from each of its letters to the end."""


@pytest.fixture
def foreign(tiny_bundle: Callable[..., Bundle], tmp_path: Path) -> LanguageModel:
    """A model whose template puts a megabyte before each question, and whose tokenizer takes
    quadratic time."""
    folder = tmp_path / "bundle"
    shutil.copytree(tiny_bundle().path, folder)
    bundle = Bundle(folder)
    bundle.tokenizer.backend.pre_tokenizer = QUADRATIC
    written = "{{ 'x' * 1000000 }}{% for m in messages %}{{ m.content }}{% endfor %}"
    bundle.tokenizer = replace(bundle.tokenizer, chat_template=written)
    return LanguageModel(bundle, "portable")


def test_a_text_is_measured_before_it_is_encoded(foreign: LanguageModel) -> None:
    started = time.monotonic()
    most = foreign.context * foreign.bundle.tokenizer.longest
    for prompt in ([{"role": "user", "content": "Hi"}], "x" * 1_000_002):
        with pytest.raises(CetaneError, match=f"has 1000002 bytes, the context holds .* {most}"):
            foreign.generate(prompt)
    assert time.monotonic() - started < 5


def test_ctrl_c_ends_the_encoding(foreign: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited for the tokenizer: here some seconds."""
    monkeypatch.setattr(type(foreign), "context", 1_000_000)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
    started = time.monotonic()
    main = threading.get_ident()
    threading.Timer(0.3, signal.pthread_kill, [main, signal.SIGINT]).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            foreign.ids("x" * 60_000)
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - started < 3


def test_a_closed_model_writes_no_more(tiny_bundle: Callable[..., Bundle]) -> None:
    """With a drafter, whose thread ends too, it raised RuntimeError."""
    model = LanguageModel(tiny_bundle(), "portable", DrafterOptions("ngram"))
    stream = model.stream([3, 4, 5], max_new_tokens=20)
    next(stream)
    model.close()
    model.close()
    assert not list(stream) and stream.completion.finish_reason == "interrupted"
    for prompt in ([3, 4, 5], [3, 4, 5, 6]):
        with pytest.raises(CetaneError, match=r"the model is closed .load it again"):
            model.generate(prompt)
