"""The conversation: commands, Ctrl-C, what is printed."""

import time
from pathlib import Path

import pytest

from cetane.bundle import Bundle
from cetane.cli import chat, output
from cetane.pipeline.answer_session import CompletionStream

from .conftest import Cetane


def talk(cetane: Cetane, bundle: Bundle, *lines: str, max_new: int = 5):
    stdin = "".join(f"{line}\n" for line in lines)
    return cetane("run", bundle.path, "--chat", "--max-new", max_new, stdin=stdin)


def test_commands(cetane: Cetane, ported: Bundle) -> None:
    told = talk(cetane, ported, "/help", "/nonsense", "/reset")
    assert told.code == 0
    assert "/system TEXT" in told.err
    assert max(map(len, chat.HELP.splitlines())) <= 80
    assert "no command /nonsense; /help lists them" in told.err
    assert "starts anew" in told.err


def test_reset_forgets(cetane: Cetane, ported: Bundle) -> None:
    once = talk(cetane, ported, "Fuel?").out.splitlines()[0]
    answers = talk(cetane, ported, "Hi", "/reset", "Fuel?").out
    assert once.removeprefix("> ") in answers


def test_a_system_text_changes_the_answer(cetane: Cetane, ported: Bundle) -> None:
    plain = talk(cetane, ported, "Fuel?").out
    told = talk(cetane, ported, "/system ignites ignites", "Fuel?").out
    assert plain.removeprefix("> ") not in told


def test_every_answer_says_how_it_ended(cetane: Cetane, ported: Bundle) -> None:
    told = talk(cetane, ported, "Hi")
    assert "tokens/s, stopped at --max-new]" in told.err
    assert "the context of 64 tokens is full" in talk(cetane, ported, "Hi", max_new=500).err


def test_ctrl_c_stops_one_answer(
    cetane: Cetane, ported: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = CompletionStream.__next__
    stopped = []

    def interrupted(stream: CompletionStream) -> str:
        piece = pieces(stream)
        if not stopped:
            stopped.append(piece)
            raise KeyboardInterrupt
        return piece

    monkeypatch.setattr(CompletionStream, "__next__", interrupted)
    told = talk(cetane, ported, "Hi", "Fuel?")
    assert told.code == 0  # the conversation went on
    assert "stopped by you" in told.err and "stopped at --max-new" in told.err
    stopped.clear()
    told = cetane("run", ported.path, "Hi", "--max-new", 5)
    assert told.code == 130 and "stopped by you" in told.err


def test_a_base_model_is_warned_of(
    cetane: Cetane, ported: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "base model" not in talk(cetane, ported).err
    monkeypatch.setattr("cetane.cli.chat.LanguageModel", None, raising=False)
    monkeypatch.setattr(
        "cetane.pipeline.language_model.LanguageModel.chats", property(lambda _: False)
    )
    assert "a base model without a chat template" in talk(cetane, ported).err


def test_the_history_lasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readline = pytest.importorskip("readline")
    monkeypatch.setenv("CETANE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(type(chat.errors), "is_terminal", property(lambda _: True))
    with chat.Lines():
        readline.add_history("What ignites?")
    assert "What ignites?" in (tmp_path / "cache/chat-history").read_text()
    assert (tmp_path / "cache/chat-history").stat().st_mode & 0o077 == 0


def test_a_question_of_more_bytes_than_the_context_holds(cetane: Cetane, ported: Bundle) -> None:
    """It is refused before it is encoded, and the conversation goes on."""
    told = talk(cetane, ported, "Fuel? " * 10_000, "Hi")
    assert "the prompt has 600" in told.err and told.code == 0
    assert "tokens/s" in told.err


def test_a_long_prompt_is_not_read_in_silence(
    cetane: Cetane, ported: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = CompletionStream.__next__

    def slow(stream: CompletionStream) -> str:
        time.sleep(0 if stream.completion.text else 0.2)
        return pieces(stream)

    monkeypatch.setattr(CompletionStream, "__next__", slow)
    monkeypatch.setattr(output, "FIRST_LINE_AFTER", 0.05)
    told = cetane("run", ported.path, "--prompt-ids", "5,6,7", "--max-new", 5)
    assert told.code == 0 and "reading 3 tokens\n" in told.err
    counted = cetane("run", ported.path, "--prompt-ids", "5,6,7", "--max-new", 5, "--json")
    assert "answer\n" in counted.err and counted.json["text"] == told.out.removesuffix("\n")
