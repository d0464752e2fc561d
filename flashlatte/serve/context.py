"""State that all requests share: the engine, the tokenizer, and the limits."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from flashlatte.engine.async_engine import AsyncEngine
from flashlatte.engine.engine import Engine
from flashlatte.engine.validation import checked_tokens
from flashlatte.serve.errors import ApiError
from flashlatte.serve.fields import Fields
from flashlatte.serve.metrics import ServerMetrics


@dataclass(frozen=True)
class ServerLimits:
    """Limits of requests and connections.

    Attributes:
        max_body_bytes: maximum size of a body.
        body_seconds: time within which a body must arrive.
        write_seconds: maximum time that a client leaves a part of a stream unread, after the socket's buffer is full.
        drain_seconds: time that running requests have to end when the server is stopped.
    """

    max_body_bytes: int = 4 << 20
    body_seconds: float = 30.0
    write_seconds: float = 60.0
    drain_seconds: float = 30.0


@dataclass(frozen=True)
class ServerContext:
    """The state of one server.

    Attributes:
        engine: runs the requests. It has a tokenizer.
        metrics: counts and times of requests.
        model_name: name of the model in the API.
        max_model_len: maximum number of tokens of a prompt and its output.
        limits: limits of requests and connections.
        created: Unix time of the start, in seconds.
    """

    engine: AsyncEngine
    metrics: ServerMetrics
    model_name: str
    max_model_len: int
    limits: ServerLimits = field(default_factory=ServerLimits)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def tokenizer(self) -> Any:
        return self.engine.engine.tokenizer

    def check_model(self, fields: Fields) -> None:
        """Read the field ``model``. Status 404 if it is not the server's model."""
        self.check_name(fields.checked_text("model", fields.required("model")))

    def check_name(self, name: str) -> None:
        if name != self.model_name:
            raise ApiError(
                404, f"model must be {self.model_name!r}, got {name!r:.200}", param="model", code="model_not_found"
            )

    def check_num_outputs(self, num_prompts: int, n: int, name: str) -> None:
        """Status 400 for more outputs than the engine accepts at a time. ``name`` is the field of the prompts."""
        if num_prompts * n > (limit := self.engine.max_num_outputs):
            param = name if num_prompts > 1 else "n"
            message = f"{param} must ask for at most {limit} outputs, got {num_prompts * n}"
            raise ApiError(400, message, param=param)

    def decode(self, tokens: list[int], name: str) -> str:
        """The text of tokens. Status 400 for tokens outside the vocabulary, for which tokenizers raise other errors."""
        try:
            checked_tokens(name, tokens, self.engine.engine.model)
        except ValueError as error:
            raise ApiError(400, str(error), param=name) from None
        return self.tokenizer.decode(tokens)

    def room_after(self, prompts: list[list[int]], name: str) -> int:
        """Number of tokens that fit the context after the longest prompt. Status 400 if none does."""
        longest = max(map(len, prompts))
        if longest >= self.max_model_len:
            raise ApiError(
                400,
                f"{name} must have at most {self.max_model_len - 1} tokens, got {longest}",
                param=name,
                code="context_length_exceeded",
            )
        return self.max_model_len - longest


def max_context(engine: Engine) -> int:
    """Maximum number of tokens of a prompt and its output: the model's positions, or the capacity of the cache."""
    # The last token of an output is never stored.
    return min(engine.model.max_position, engine.pool.num_pages * engine.pool.page_size + 1)
