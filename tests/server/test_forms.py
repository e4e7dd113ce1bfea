"""Answers are made so that other clients of the event loop need not wait."""

import asyncio
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from cetane.server.chat_form import ChatForm
from cetane.server.completion_form import CompletionForm
from cetane.server.requests import ChatRequest, CompletionRequest
from cetane.server.writing import Ending, Event, Piece

PIECES = 50


def form() -> CompletionForm:
    tokenizer = SimpleNamespace(stream=lambda _: None)
    served: Any = SimpleNamespace(tokenizer=tokenizer, bundle=SimpleNamespace(digest="0" * 64))
    ask: Any = SimpleNamespace(echo=False, ids=(1,))
    return CompletionForm(CompletionRequest(model="it", prompt="x"), served, [ask])


def test_blanks_before_a_call_are_in_no_stream() -> None:
    """A whole answer leaves them out, and the text between words stays."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    asked: Any = {"model": "it", "messages": [{"role": "user", "content": "x"}], "tools": [tool]}
    plain = form()
    made = ChatForm(ChatRequest.model_validate(asked), plain.served, plain.asks)
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    chunks = []
    for event in (Piece("ok "), Piece("then \n"), Piece(call), Ending("stop", 1, 0, 3)):
        made.choices[0].add(event)
        chunks += made.chunks(0, event)
    streamed = "".join(chunk.delta.content or "" for chunk in chunks)
    assert streamed == made.choice(0, made.choices[0]).message.content == "ok then"


async def events() -> AsyncIterator[tuple[int, Event]]:
    """An answer that is written already, so that nothing makes its reader wait."""
    for _ in range(PIECES):
        yield 0, Piece("x")
    yield 0, Ending("length", 1, 0, PIECES)


def test_a_stream_gives_others_a_turn_after_each_event() -> None:
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def read() -> list[str]:
        task = asyncio.create_task(other())
        lines = [one async for one in form().stream(events())]
        task.cancel()
        return lines

    assert len(asyncio.run(read())) == PIECES + 2  # its end, and [DONE]
    assert turns > PIECES


def test_a_whole_answer_is_made_by_another_thread() -> None:
    threads = []

    class Watched(CompletionForm):
        def choice(self, number: int, choice: Any) -> Any:
            threads.append(threading.current_thread())
            return super().choice(number, choice)

    watched = form()
    watched.__class__ = Watched
    assert b'"text":"' + b"x" * PIECES in asyncio.run(watched.whole(events()))
    assert threads and threading.main_thread() not in threads
