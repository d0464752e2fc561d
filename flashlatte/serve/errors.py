"""Errors of the API, in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from flashlatte.engine.async_engine import EngineStopped, QueueFull, StepFailed

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """A response with a status from 400 on.

    Args:
        param: the field of the request that is wrong.
        code: machine-readable name of the error.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers
        self._message, self._param, self._code = message, param, code

    def body(self) -> dict[str, Any]:
        """The response's JSON."""
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self._message, "type": kind, "param": self._param, "code": self._code}}


def field_error(error: Exception, fields: Collection[str]) -> ApiError:
    """Status 400 for an error of the library, whose messages begin with the argument's name."""
    param = str(error).partition(" ")[0]
    return ApiError(400, str(error), param=param if param in fields else None)


def engine_error(error: Exception) -> ApiError:
    """The response to an error of ``AsyncEngine``. Internal reasons are only logged."""
    if isinstance(error, QueueFull):
        return ApiError(429, f"too many requests: {error}", code="queue_full", headers={"retry-after": "1"})
    if isinstance(error, EngineStopped):
        return ApiError(503, "the server is stopping", code="stopping")
    if isinstance(error, StepFailed):
        return ApiError(500, "the engine failed; the server's log has the reason", code="engine_failed")
    return ApiError(500, "the server failed; its log has the reason", code="internal_error")
