"""Bodies of requests: read within limits of size and time, and checked field by field."""

import asyncio
from typing import Any, TypeVar

from fastapi import Request
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from cetane.errors import CetaneError
from cetane.server.errors import ApiError
from cetane.server.requests import RequestBody
from cetane.server.settings import Settings
from cetane.validation import parse_json, worded

Kind = TypeVar("Kind", bound=RequestBody)


async def read(http: Request, settings: Settings) -> bytes:
    """The body of a request for JSON. Raises ApiError, also if it is too large or too slow."""
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
    return bytes(body)


def parse(kind: type[Kind], body: bytes) -> Kind:
    """The request in a body. Raises ApiError that names the wrong field."""
    try:
        content = parse_json(body, "the request's body", unique=True)  # a proxy may see the first
    except CetaneError as error:
        raise ApiError(400, error.message, code="invalid_json") from error
    if not isinstance(content, dict):
        raise ApiError(400, "the request's body is not a JSON object", code="invalid_json")
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise wrong_field(error, kind, content) from error
    except (RecursionError, OverflowError) as error:
        raise ApiError(400, f"the request's body: {error}", code="invalid_json") from error


def wrong_field(
    error: ValidationError, kind: type[RequestBody], content: dict[str, Any]
) -> ApiError:
    """The error for the first wrong field of a request's content."""
    every = error.errors(include_url=False, include_context=False)
    of_first = [one for one in every if one["loc"][:1] == every[0]["loc"][:1]]
    first = max(of_first, key=lambda one: len(one["loc"]))  # of a union, the kind that fits best
    text, path = worded(first, kind), place(first, content)
    param, colon, _ = text.partition(":")  # the text of a rule about several fields names one
    if path:
        param = ".".join(path)
        text = f"{param}: {text}"
    known = {"extra_forbidden": "unknown_parameter", "missing": "missing_required_parameter"}
    code = known.get(first["type"], "invalid_value")
    return ApiError(400, text, param if path or colon else None, code)


def place(error: ErrorDetails, content: Any) -> list[str]:
    """The keys of the request's content that lead to an error. Pydantic's location also names the
    kinds of unions, which no client knows."""
    path, location = [], error["loc"]
    for number, part in enumerate(location, 1):
        absent = error["type"] == "missing" and number == len(location)
        inside = part in (content if isinstance(content, dict) else ())
        if inside or absent or (isinstance(content, list) and isinstance(part, int)):
            path.append(str(part))
            content = None if absent else content[part]
    return path
