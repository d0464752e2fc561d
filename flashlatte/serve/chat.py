"""``/v1/chat/completions``: continues a conversation, by the tokenizer's chat template."""

from __future__ import annotations

import inspect
from typing import Any

from flashlatte.engine.chat import chat_tokens
from flashlatte.serve.context import ServerContext
from flashlatte.serve.errors import ApiError
from flashlatte.serve.fields import Fields, parse_json
from flashlatte.serve.job import ChoicePart, GenerationJob
from flashlatte.serve.logprobs import chat_logprobs
from flashlatte.serve.sampling import MAX_LOGPROBS, read_rest, read_sampling, read_stream, sampling_params

# Templates ignore unknown roles without an error. "developer" is OpenAI's newer name of "system".
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_UNSUPPORTED = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}


class ChatForm:
    """The JSON of chat.

    Args:
        num_top: most likely tokens to list at each position, if log-probabilities are requested.
    """

    id_prefix, object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, num_top: int) -> None:
        self._num_top = num_top

    def choice(self, part: ChoicePart) -> dict[str, Any]:
        return self._choice(part, "message", {"role": "assistant", "content": part.text, "refusal": None})

    def chunk(self, part: ChoicePart) -> dict[str, Any]:
        delta = {"role": "assistant"} if part.is_first else {}
        return self._choice(part, "delta", delta | ({"content": part.text} if part.text or part.is_first else {}))

    def _choice(self, part: ChoicePart, name: str, content: dict[str, Any]) -> dict[str, Any]:
        return {
            "index": part.index,
            name: content,
            "logprobs": None if part.scored is None else chat_logprobs(part.scored, self._num_top),
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }


def parse_chat(body: bytes, context: ServerContext) -> GenerationJob:
    """Parse the body of a request.

    Raises:
        ApiError: a field is wrong, or not supported; the template refuses the messages.
    """
    fields = parse_json(body)
    context.check_model(fields)
    values = read_sampling(fields)
    stream, include_usage = read_stream(fields)
    max_tokens, name = fields.integer("max_completion_tokens", 1), "max_completion_tokens"
    older = fields.integer("max_tokens", 1)
    if max_tokens is None:
        max_tokens, name = older, "max_tokens"
    elif older not in (None, max_tokens):
        raise fields.error("max_tokens", f"max_completion_tokens, {max_tokens}, or absent", older)
    logprobs, num_top = bool(fields.flag("logprobs")), fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    if num_top is not None and not logprobs:
        raise ApiError(400, "top_logprobs needs logprobs", param="top_logprobs")
    if logprobs:
        values["logprobs"] = num_top or 0
    for unsupported, neutral in _UNSUPPORTED.items():
        fields.unsupported(unsupported, *neutral)
    messages = _messages(fields)
    options = _template_options(fields, context.tokenizer, messages)
    salt = read_rest(fields)
    try:
        tokens = [chat_tokens(context.tokenizer, messages, **options)]
    except ValueError as error:
        raise ApiError(400, str(error), param="messages") from error
    if not tokens[0]:
        raise ApiError(400, "messages must have at least one token, got none", param="messages")
    room = context.room_after(tokens, "messages")
    sampling = sampling_params(values, room, max_tokens, room, name)
    return GenerationJob(tokens, sampling, ChatForm(num_top or 0), "messages", stream, include_usage, salt)


def _messages(fields: Fields) -> list[dict[str, str]]:
    messages = []
    for number, value in enumerate(fields.non_empty_list("messages")):
        path = f"messages[{number}]"
        if not isinstance(value, dict):
            raise fields.error(path, "an object", value)
        message = Fields(value, path)
        role = message.required("role")
        if not isinstance(role, str) or role not in ROLES:
            raise message.error("role", f"one of {', '.join(ROLES)}", role)
        found = {"role": ROLES[role], "content": _content(message)}
        if (name := message.text("name")) is not None:
            found["name"] = name
        message.unsupported("tool_calls", [])
        message.unsupported("refusal")
        message.unsupported("annotations", [])
        message.finish()
        messages.append(found)
    return messages


def _content(message: Fields) -> str:
    """The text of a message: a string, or parts of type "text", which are joined by newlines as in vLLM."""
    value = message.required("content")
    if not isinstance(value, list):
        return message.checked_text("content", value)
    texts = []
    for number, item in enumerate(value):
        if not isinstance(item, dict):
            raise message.error(f"content[{number}]", "an object", item)
        part = Fields(item, message.path(f"content[{number}]"))
        kind = part.required("type")
        if kind != "text":
            raise part.error("type", "'text'", kind, code="unsupported_field")
        texts.append(part.checked_text("text", part.required("text")))
        part.finish()
    return "\n".join(texts)


def _template_options(fields: Fields, tokenizer: Any, messages: list[dict[str, str]]) -> dict[str, Any]:
    """vLLM's fields for the template."""
    continues = bool(fields.flag("continue_final_message"))
    begins = fields.flag("add_generation_prompt")
    if continues and begins:
        raise ApiError(400, "add_generation_prompt excludes continue_final_message", param="add_generation_prompt")
    if continues and not messages[-1]["content"].strip():
        raise ApiError(400, "continue_final_message needs a last message with text", param="continue_final_message")
    arguments: dict[str, Any] = {}
    if (given := fields.fields("chat_template_kwargs")) is not None:
        reserved = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters}
        for name, value in given.remaining().items():
            given.checked_text("the name of a field", name)
            # A client's own template would run on the server, and special tokens are defined by the checkpoint.
            if name in reserved or name.endswith(("_token", "_tokens")) or not name.isidentifier():
                raise given.error(name, "a variable of the model's template", value)
            if not isinstance(value, (bool, int, float, str)):
                raise given.error(name, "a string, a number, true or false", value)
            arguments[name] = given.checked_text(name, value) if isinstance(value, str) else value
    return {
        "continue_final_message": continues,
        "add_generation_prompt": not continues if begins is None else begins,
        "template_arguments": arguments,
    }
