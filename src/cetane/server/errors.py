"""Errors in the form of OpenAI's API."""

from typing import Any

from cetane.errors import CetaneError, printable


class ApiError(CetaneError):
    """An error that a client gets: an HTTP status, and the field that is wrong if it is one."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code = status, code
        self.param = None if param is None else printable(param)  # a client's key may have any size

    @property
    def kind(self) -> str:
        """The error's type, as OpenAI's API names it."""
        named = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        other = "server_error" if self.status >= 500 else "invalid_request_error"
        return named.get(self.status, other)

    def as_json(self) -> dict[str, Any]:
        """The body of the response."""
        content = {
            "message": self.message, "type": self.kind, "param": self.param, "code": self.code
        }  # fmt: skip
        return {"error": content}


def unsupported(param: str, reason: str) -> ApiError:
    """An error about a field that this model or this server cannot honour."""
    return ApiError(400, f"{param}: {reason}", param, "unsupported_value")
