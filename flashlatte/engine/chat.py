"""Converts the messages of a conversation to a prompt's tokens, by the chat template of the checkpoint's tokenizer."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any


def chat_tokens(
    tokenizer: Any,
    messages: Sequence[Mapping[str, str]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    template_arguments: Mapping[str, Any] | None = None,
) -> list[int]:
    """The tokens of a conversation.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        messages: each with "role" and "content".
        add_generation_prompt: whether the prompt ends with the start of an assistant message.
        continue_final_message: whether the output continues the last message instead of starting a new one.
        template_arguments: further variables of the template.

    Raises:
        ModuleNotFoundError: jinja2 is not installed.
        ValueError: the tokenizer has no template, or the template refuses the messages.
    """
    if importlib.util.find_spec("jinja2") is None:
        raise ModuleNotFoundError("chat templates need jinja2: pip install 'flashlatte[serve]'")
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError("messages need a chat template, and the model's tokenizer has none")
    try:
        text = tokenizer.apply_chat_template(
            list(messages),
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **(template_arguments or {}),
        )
    except Exception as error:  # of many types: templates raise_exception, or fail on what they do not expect
        raise ValueError(f"messages must fit the model's chat template: {error}") from error
    return tokenizer.encode(text, add_special_tokens=False)
