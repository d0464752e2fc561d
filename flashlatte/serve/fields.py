"""Reads the fields of a JSON object, checks their types and ranges, and refuses unknown fields.

null is the same as an absent field. Errors name the field by its path, such as ``messages[2].content``.
"""

from __future__ import annotations

import json
import math
import reprlib
from typing import Any

from flashlatte.serve.errors import ApiError

# OpenAI's and vLLM's servers have no such limits. They bound the work that one request can cause in a step.
MAX_ENTRIES = 1024


def parse_json(body: bytes) -> Fields:
    """The fields of a body.

    Raises:
        ApiError: it is not UTF-8, not JSON, or not an object.
    """
    try:
        values = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ApiError(400, f"the body must be JSON in UTF-8: {reason}", code="invalid_json") from None
    if not isinstance(values, dict):
        raise ApiError(400, f"the body must be a JSON object, got {type(values).__name__}", code="invalid_json")
    return Fields(values)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


class Fields:
    """The fields of an object. Each method reads one; ``finish`` refuses those that were not read.

    Args:
        path: path of the object in the body.

    Raises:
        ApiError: status 400, in all methods.
    """

    def __init__(self, values: dict[str, Any], path: str = "") -> None:
        self._values = {name: value for name, value in values.items() if value is not None}
        self._path = path

    def path(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def error(self, name: str, accepted: str, value: Any, code: str | None = None) -> ApiError:
        """An error for a field, with its accepted values."""
        path = self.path(name)
        return ApiError(400, f"{path} must be {accepted}, got {reprlib.repr(value)}", param=path, code=code)

    def take(self, name: str) -> Any:
        return self._values.pop(name, None)

    def required(self, name: str) -> Any:
        if name not in self._values:
            raise ApiError(400, f"{self.path(name)} is missing", param=self.path(name), code="missing_field")
        return self._values.pop(name)

    def flag(self, name: str) -> bool | None:
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise self.error(name, "true or false", value)
        return value

    def integer(self, name: str, low: int, high: int | None = None) -> int | None:
        value = self.take(name)
        if value is None:
            return None
        if type(value) is not int or value < low or (high is not None and value > high):
            raise self.error(name, f"an integer from {low}" + ("" if high is None else f" to {high}"), value)
        return value

    def number(self, name: str) -> float | None:
        """A finite number; its range is checked by ``SamplingParams``."""
        value = self.take(name)
        if value is None:
            return None
        if type(value) not in (int, float) or abs(value) > 1e300 or not math.isfinite(value):
            raise self.error(name, "a finite number", value)
        return float(value)

    def text(self, name: str) -> str | None:
        value = self.take(name)
        return None if value is None else self.checked_text(name, value)

    def checked_text(self, name: str, value: Any) -> str:
        """A string that can be encoded in UTF-8."""
        if not isinstance(value, str):
            raise self.error(name, "a string", value)
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise self.error(name, "a string without lone surrogates", value) from None
        return value

    def texts(self, name: str, count: int, length: int) -> list[str]:
        """A string, or a list of at most ``count`` strings, none of them empty or longer than ``length``."""
        value = self.take(name)
        values = [] if value is None else value if isinstance(value, list) else [value]
        if len(values) > count:
            raise self.error(name, f"at most {count} strings", value)
        for one in values:
            if not 0 < len(self.checked_text(name, one)) <= length:
                raise self.error(name, f"strings of 1 to {length} characters", one)
        return values

    def token_ids(self, name: str) -> list[int] | None:
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) > MAX_ENTRIES or any(type(one) is not int for one in value):
            raise self.error(name, f"a list of at most {MAX_ENTRIES} token ids", value)
        return value

    def fields(self, name: str) -> Fields | None:
        """An object."""
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, "an object", value)
        return Fields(value, self.path(name))

    def non_empty_list(self, name: str) -> list[Any]:
        """A required list that is not empty."""
        value = self.required(name)
        if not isinstance(value, list) or not value:
            raise self.error(name, "a list that is not empty", value)
        return value

    def unsupported(self, name: str, *neutral: Any) -> None:
        """Refuse a field that the server does not support, unless its value changes nothing."""
        value = self.take(name)
        if value is not None and value not in neutral:
            raise ApiError(
                400,
                f"{self.path(name)} is not supported by this server",
                param=self.path(name),
                code="unsupported_field",
            )

    def remaining(self) -> dict[str, Any]:
        """All fields that were not read; marks them as read."""
        values, self._values = self._values, {}
        return values

    def finish(self) -> None:
        """Refuse the fields that were not read."""
        for name in self._values:
            path = self.path(self.checked_text("the name of a field", name))
            raise ApiError(400, f"{path} is not a known field", param=path, code="unknown_field")
