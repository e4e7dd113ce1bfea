"""The application: its routes, and the key that they need."""

import base64
import hashlib
import hmac
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from cetane.checkpoint.tokenizer import ROLES
from cetane.errors import CetaneError
from cetane.files import shipped_text
from cetane.server.answer_form import AnswerForm
from cetane.server.asks import chat_asks, completion_asks
from cetane.server.bodies import parse, read
from cetane.server.chat_form import ChatForm
from cetane.server.completion_form import CompletionForm
from cetane.server.errors import ApiError
from cetane.server.hosts import KnownHosts
from cetane.server.prompts import check_known
from cetane.server.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from cetane.server.responses import GONE, in_api_form, respond, unless_gone
from cetane.server.served import Served
from cetane.server.service import Service
from cetane.server.settings import Settings
from cetane.server.writing import Ask
from cetane.validation import validated

Prompted = TypeVar("Prompted", ChatRequest, CompletionRequest)
AsksOf = Callable[[Prompted, Served, Settings], list[Ask]]


def add_tokenizer(router: APIRouter, service: Service) -> None:
    """Routes of the tokenizer, as vLLM has them."""

    @router.post("/tokenize")
    async def tokenize(http: Request) -> Response:
        def tokenized(body: bytes) -> Response:
            request = parse(TokenizeRequest, body)
            served = service.worker(request.model).served
            tokens = served.tokenizer.encode_aside(request.prompt, request.add_special_tokens)
            count, longest = len(tokens), served.context
            return JSONResponse({"tokens": tokens, "count": count, "max_model_len": longest})

        body = await read(http, service.settings)
        return await unless_gone(http, service.prepared(partial(tokenized, body), len(body)))

    @router.post("/detokenize")
    async def detokenize(http: Request) -> Response:
        def detokenized(body: bytes) -> Response:
            request = parse(DetokenizeRequest, body)
            served = service.worker(request.model).served
            check_known(request.tokens, served, "tokens")
            return JSONResponse({"prompt": served.tokenizer.decode_aside(request.tokens, False)})

        body = await read(http, service.settings)
        return await unless_gone(http, service.prepared(partial(detokenized, body), len(body)))

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        """What lm-eval asks before it uses the routes above (as vLLM answers)."""
        tokenizer = service.worker(None).served.tokenizer
        tokens = {role: tokenizer.special_tokens.get(role) for role in ROLES}
        return {**tokens, "chat_template": tokenizer.chat_template}


def add_answers(router: APIRouter, service: Service) -> None:
    """Routes whose answers a model writes."""
    settings = service.settings

    async def answered(
        http: Request, kind: type[Prompted], asks_of: AsksOf[Prompted], form: type[AnswerForm]
    ) -> Response:
        body = await read(http, settings)
        parsed = service.prepared(partial(parse, kind, body), len(body))
        request = await unless_gone(http, parsed)
        worker = service.worker(request.model)
        made = service.prepared(
            partial(asks_of, request, worker.served, settings), len(body), request.constrained
        )
        asks = await unless_gone(http, made)
        return await respond(http, worker, form(request, worker.served, asks))

    @router.post("/v1/chat/completions")
    async def chat(http: Request) -> Response:
        return await answered(http, ChatRequest, chat_asks, ChatForm)

    @router.post("/v1/completions")
    async def completions(http: Request) -> Response:
        return await answered(http, CompletionRequest, completion_asks, CompletionForm)


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
    add_answers(router, service)

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


def not_routed(http: Request, error: HTTPException) -> ApiError:
    """The error about a request of no route. It has the path: clients of OpenAI's take a 404
    without one for a missing model."""
    known = "; known: /v1/chat/completions, /v1/completions, /v1/models"
    said = f"{error.detail}: {http.method} {http.url.path}"
    return ApiError(error.status_code, said + known * (error.status_code == 404))


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

    @app.api_route("/health", methods=["GET", "HEAD"])  # many monitors ask with HEAD
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    handlers: dict[type[Exception], Callable[[Request, Any], Response]] = {
        ApiError: lambda _, error: in_api_form(error),
        CetaneError: lambda _, error: in_api_form(ApiError(400, str(error))),
        HTTPException: lambda http, error: in_api_form(not_routed(http, error)),
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
    opened = [Served(Path(bundle), backend, checked) for bundle in bundles]
    return create_app(Service(opened, checked))
