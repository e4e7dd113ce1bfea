"""The names under which clients may address a server."""

import re
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from cetane.server.errors import ApiError
from cetane.server.responses import in_api_form

HOST = re.compile(r"(\[[^]]*\]|[^:]*)(?::[0-9]*)?")
"""A Host header: a name or an address, and perhaps a port. Only IPv6's colons need brackets."""


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
