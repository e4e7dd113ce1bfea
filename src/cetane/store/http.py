"""Answers of HTTP servers, which are no longer than what was asked for.

A server may ignore a range and send without end, or send a few bytes that unpack to gigabytes.
fsspec reads whatever comes.
"""

import re
from typing import Any

import aiohttp

from cetane.errors import CetaneError
from cetane.files import LARGEST

RANGE = re.compile(r"bytes=([0-9]+)-([0-9]+)")
PIECE = 1 << 20
"""Bytes that are read at a time."""
ABSENT = (403, 404, 410)
"""Statuses of a file that is not there: public buckets say 403, to hide what they hold."""


class Answer(aiohttp.ClientResponse):
    """An answer of at most as many bytes as the range that was asked for."""

    async def read(self) -> bytes:
        """The whole content, unpacked. Raises CetaneError for more than was asked for."""
        asked = RANGE.fullmatch(self.request_info.headers.get("Range", ""))
        most = int(asked[2]) - int(asked[1]) + 1 if asked else LARGEST
        content = bytearray()
        async for piece in self.content.iter_chunked(PIECE):
            content += piece
            if len(content) > most:
                self.close()
                raise CetaneError(
                    f"{self.url} gave more than the {most} bytes that were asked for",
                    "it changed, or the server does not serve ranges: copy the model to this"
                    " machine",
                )
        return bytes(content)


async def client(**options: Any) -> aiohttp.ClientSession:
    """A session for fsspec, whose answers have these limits."""
    return aiohttp.ClientSession(response_class=Answer, **options)


def failed(error: BaseException | None) -> bool:
    """Whether a server failed, or the URL can be none. fsspec tells both as a file that is not
    there."""
    if isinstance(error, ValueError):  # a port of 99999, or a host that has no end
        return True
    return isinstance(error, aiohttp.ClientError) and getattr(error, "status", None) not in ABSENT
