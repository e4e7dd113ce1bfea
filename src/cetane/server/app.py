"""The application: routes, keys, limits and errors."""

import asyncio
import base64
import hashlib
import hmac
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from cetane.errors import CetaneError
from cetane.files import shipped_text
from cetane.server.asks import chat_asks, check_known, completion_asks
from cetane.server.compiler import Compiler
from cetane.server.errors import ApiError
from cetane.server.forms import AnswerForm, ChatForm, CompletionForm
from cetane.server.metrics import Metrics
from cetane.server.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    RequestBody,
    TokenizeRequest,
    parse,
)
from cetane.server.served import Served
from cetane.server.settings import Settings
from cetane.server.worker import Worker, late
from cetane.server.writing import Ask
from cetane.validation import validated

Kind = TypeVar("Kind", bound=RequestBody)
Prompted = TypeVar("Prompted", bound=GenerationRequest)
AsksOf = Callable[[Prompted, Served, Settings], list[Ask]]
Result = TypeVar("Result")

HOST = re.compile(r"(\[[^]]*\]|[^:]*)(?::[0-9]*)?")
"""A Host header: a name or an address, and perhaps a port. Only IPv6's colons need brackets."""

GONE = Response(status_code=499)
"""The response to a client that has left, which nobody reads. 499 is nginx's status for it."""


class Service:
    """All models of a server, each with its worker."""

    def __init__(self, models: Sequence[Served], settings: Settings) -> None:
        self.settings, self.metrics = settings, Metrics()
        self.compiler = Compiler(settings.queue)
        self.workers = [Worker(served, settings, self.metrics) for served in models]
        self.models = {name: worker for worker in self.workers for name in worker.served.adapters}
        """The workers by the names of models: of bundles, and of bundles with an adapter."""
        if len(self.models) < sum(len(served.adapters) for served in models):
            raise CetaneError("two bundles have the same name", "rename one of the folders")

    def worker(self, name: str | None) -> Worker:
        """The worker of a model; without a name, of the first. Raises ApiError."""
        if name is None:
            return self.workers[0]
        if name not in self.models:
            known = ", ".join(self.models)
            raise ApiError(404, f"model: no {name!r}; known: {known}", "model", "model_not_found")
        return self.models[name]

    async def prepared(
        self, request: Prompted, served: Served, asks_of: AsksOf[Prompted]
    ) -> list[Ask]:
        """The asks of a request, made in a thread. Raises ApiError."""
        work = partial(asks_of, request, served, self.settings)
        if not request.constrained:
            return await asyncio.to_thread(work)
        try:
            async with asyncio.timeout(self.settings.seconds):
                return await self.compiler.run(work)
        except TimeoutError as error:
            raise late() from error

    def close(self) -> None:
        """Take no more requests. Running answers may end within the settings' `grace` seconds."""
        for worker in self.workers:
            worker.close(self.settings.grace)

    @asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        for worker in self.workers:
            worker.open()
        try:
            yield
        except asyncio.CancelledError:  # a second signal: nothing is waited for, and no error
            return
        self.close()
        for worker in self.workers:
            await asyncio.to_thread(worker.join)


async def read(kind: type[Kind], http: Request, settings: Settings) -> Kind:
    """The request in a body. Raises ApiError, also for a body that is too large or too slow."""
    media = http.headers.get("content-type", "").split(";")[0].strip().lower()
    if media != "application/json":  # a page on another site cannot send this without CORS
        raise ApiError(415, "the content type must be application/json")
    too_large = ApiError(413, f"the body has more than {settings.body_bytes} bytes")
    declared = http.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > settings.body_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(settings.body_seconds):
            async for chunk in http.stream():
                body += chunk
                if len(body) > settings.body_bytes:
                    raise too_large
    except TimeoutError as error:
        raise ApiError(408, "the body did not come in time") from error
    return parse(kind, bytes(body))


async def gone(http: Request) -> None:
    """Return when the client has left. The body must have been read."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def unless_gone(http: Request, work: Awaitable[Result]) -> Result | None:
    """The result of some work; None if the client leaves before."""
    task, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone(http))
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
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
        return GONE if answer is None else Response(answer, media_type="application/json")
    try:  # an error before the first event has a status of its own
        lines = form.stream(events)
        first = await unless_gone(http, anext(lines))
    except BaseException:
        worker.cancel(job)
        raise
    if first is None:
        worker.cancel(job)
        return GONE
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


def add_tokenizer(router: APIRouter, service: Service) -> None:
    """Routes of the tokenizer, as vLLM has them."""
    settings = service.settings

    @router.post("/tokenize")
    async def tokenize(http: Request) -> dict[str, Any]:
        request = await read(TokenizeRequest, http, settings)
        served = service.worker(request.model).served
        encode = served.tokenizer.encode_aside
        tokens = await asyncio.to_thread(encode, request.prompt, request.add_special_tokens)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": served.context}

    @router.post("/detokenize")
    async def detokenize(http: Request) -> dict[str, Any]:
        request = await read(DetokenizeRequest, http, settings)
        served = service.worker(request.model).served
        check_known(request.tokens, served, "tokens")
        text = await asyncio.to_thread(served.tokenizer.decode, request.tokens, False)
        return {"prompt": text}

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        """What lm-eval asks before it uses the routes above (as vLLM answers)."""
        tokenizer = service.worker(None).served.tokenizer
        roles = ("bos_token", "eos_token", "unk_token", "pad_token")
        tokens = {role: tokenizer.special_tokens.get(role) for role in roles}
        return {**tokens, "chat_template": tokenizer.chat_template}


def routes(service: Service) -> APIRouter:
    """All routes that need the API key."""
    settings = service.settings

    def check_key(http: Request) -> None:
        if settings.api_key is None:
            return
        scheme, _, sent = http.headers.get("authorization", "").partition(" ")
        key = sent.strip().encode("latin-1")  # RFC 9110, 11.1: a scheme's case does not matter
        if scheme.lower() != "bearer" or not hmac.compare_digest(key, settings.api_key.encode()):
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")

    router = APIRouter(dependencies=[Depends(check_key)])

    @router.post("/v1/chat/completions")
    async def chat(http: Request) -> Response:
        request = await read(ChatRequest, http, settings)
        worker = service.worker(request.model)
        asks = await unless_gone(http, service.prepared(request, worker.served, chat_asks))
        if asks is None:
            return GONE
        return await respond(http, worker, ChatForm(request, worker.served, asks))

    @router.post("/v1/completions")
    async def completions(http: Request) -> Response:
        request = await read(CompletionRequest, http, settings)
        worker = service.worker(request.model)
        asks = await unless_gone(http, service.prepared(request, worker.served, completion_asks))
        if asks is None:
            return GONE
        return await respond(http, worker, CompletionForm(request, worker.served, asks))

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        data = [model(name, one.served, settings) for name, one in service.models.items()]
        return {"object": "list", "data": data}

    @router.get("/v1/models/{name}")
    async def one_model(name: str) -> dict[str, Any]:
        return model(name, service.worker(name).served, settings)

    add_tokenizer(router, service)

    @router.get("/metrics")
    async def metrics() -> Response:
        content = generate_latest(service.metrics.registry)
        return Response(content, media_type=CONTENT_TYPE_LATEST)

    return router


def model(name: str, served: Served, settings: Settings) -> dict[str, Any]:
    """A model in the list of models. `parent` is the model that an adapter changes, as in vLLM; the
    last three fields are ours, for the chat page."""
    return {
        "id": name, "object": "model", "created": served.created, "owned_by": "cetane",
        "parent": None if served.adapters[name] is None else served.name,
        "context_length": served.context, "chat": served.tokenizer.has_chat_template,
        "max_tokens": settings.max_tokens or served.context,
    }  # fmt: skip


def create_app(service: Service) -> FastAPI:
    """The ASGI application of a service."""
    app = FastAPI(
        title="cetane", docs_url=None, redoc_url=None, openapi_url=None, lifespan=service.lifespan
    )
    app.state.service = service
    app.include_router(routes(service))
    page = shipped_text("server/page.html")
    policy = page_policy(page)

    @app.get("/")
    async def chat_page() -> HTMLResponse:
        return HTMLResponse(page, headers={"Content-Security-Policy": policy})

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    handlers: dict[type[Exception], Callable[[Request, Any], Response]] = {
        ApiError: lambda _, error: in_api_form(error),
        CetaneError: lambda _, error: in_api_form(ApiError(400, str(error))),
        HTTPException: lambda http, error: in_api_form(
            ApiError(error.status_code, f"{error.detail}: {http.method} {http.url.path}")
        ),
        ClientDisconnect: lambda *_: GONE,
        Exception: lambda *_: in_api_form(ApiError(500, "the server failed; its log says why")),
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)
    settings = service.settings
    if settings.hosts:
        app.add_middleware(KnownHosts, hosts=settings.hosts)
    if settings.origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.origins), allow_methods=["GET", "POST"],
            allow_headers=["*"],  # clients add their own, as OpenAI's for JavaScript does
        )  # fmt: skip
    return app


class KnownHosts:
    """Refuses requests whose Host header is none of the server's names. Starlette's own class
    answers with plain text, which is no error of OpenAI's API."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        self.app = app
        self.hosts = tuple(dict.fromkeys(map(bare, hosts)))
        only = f"Host: the server answers only to {', '.join(self.hosts)}"
        self.refusal = in_api_form(
            ApiError(400, f"{only}; start it with another --host for any name")
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        known = scope["type"] == "lifespan" or self.knows(Headers(scope=scope).get("host", ""))
        await (self.app if known else self.refusal)(scope, receive, send)

    def knows(self, header: str) -> bool:
        named = HOST.fullmatch(header)
        return named is not None and bare(named[1]) in self.hosts


def bare(host: str) -> str:
    """A host as it is compared: in small letters, an address of IPv6 without brackets."""
    return host.lower().removeprefix("[").removesuffix("]")


def page_policy(page: str) -> str:
    """The content policy of the chat page: it loads nothing, runs only its own script, and talks
    only to its own server."""

    def own(tag: str) -> str:
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; script-src {own('script')}; style-src {own('style')}; "
        "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )


def in_api_form(error: ApiError) -> Response:
    return JSONResponse(error.as_json(), error.status)


def serve(*bundles: str | Path, backend: str = "auto", **settings: Any) -> FastAPI:
    """The ASGI application that serves bundles behind OpenAI's API.

    `backend` is as in `load`; `settings` are those of `cetane.server.settings.Settings`.
    Raises CetaneError for a damaged bundle or a wrong setting.

    >>> app = cetane.serve(bundle, queue=8)
    >>> app.title
    'cetane'
    """
    if not bundles:
        raise CetaneError("no bundle to serve")
    checked = validated(Settings, settings, "the server's settings")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # texts come one by one
    opened = [Served(Path(bundle), backend, checked) for bundle in bundles]
    return create_app(Service(opened, checked))
