"""Responses: an answer as a whole or as a stream, and what a client gets that is wrong or gone."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from cetane.server.answer_form import AnswerForm
from cetane.server.errors import ApiError
from cetane.server.worker import Worker

Result = TypeVar("Result")

GONE = Response(status_code=499)
"""The response to a client that has left, which nobody reads. 499 is nginx's status for it."""


def in_api_form(error: ApiError) -> Response:
    return JSONResponse(error.as_json(), error.status)


async def gone(http: Request) -> None:
    """Return when the client has left. The body must have been read."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def unless_gone(http: Request, work: Awaitable[Result]) -> Result:
    """The result of some work. Raises ClientDisconnect if the client leaves before."""
    task, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone(http))
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for one in (task, leaving):
            one.cancel()
            with suppress(asyncio.CancelledError, ApiError):
                await one


async def respond(http: Request, worker: Worker, form: AnswerForm) -> Response:
    """Run a request and give its answer, whole or as a stream."""
    job = worker.submit(form.asks)
    events = job.events()
    if not form.request.stream:
        try:
            answer = await unless_gone(http, form.whole(events))
        finally:
            worker.cancel(job)
        return Response(answer, media_type="application/json")
    try:  # an error before the first event has a status of its own
        lines = form.stream(events)
        first = await unless_gone(http, anext(lines))
    except BaseException:
        worker.cancel(job)
        raise
    return Stream(streamed(first, lines), partial(worker.cancel, job))


class Stream(StreamingResponse):
    """A stream of events. `end` is called when it ends, also if its client left before a line was
    sent, so that the lines were never asked for."""

    def __init__(self, lines: AsyncIterator[str], end: Callable[[], None]) -> None:
        self.end = end
        headers = {"Cache-Control": "no-cache"}
        super().__init__(lines, media_type="text/event-stream", headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.end()


async def streamed(first: str, lines: AsyncIterator[str]) -> AsyncIterator[str]:
    """The lines of a stream. An error in mid-answer is a line of its own."""
    try:
        yield first
        async for one in lines:
            yield one
    except ApiError as error:
        yield f"data: {JSONResponse(error.as_json()).body.decode()}\n\n"  # type: ignore[union-attr]
