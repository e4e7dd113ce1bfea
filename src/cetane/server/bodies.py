"""Bodies of requests, within their limits of size and time."""

import asyncio

from fastapi import Request

from cetane.server.errors import ApiError
from cetane.server.settings import Settings


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
