"""``flashlatte generate``: streams a text or the answers of a conversation, then prints the speed."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from flashlatte.engine.arguments import create_engine
from flashlatte.engine.chat import chat_tokens
from flashlatte.engine.engine import Engine
from flashlatte.engine.loading import load_tokenizer
from flashlatte.engine.outputs import CompletionOutput, RequestFailed
from flashlatte.engine.paged import config_of
from flashlatte.engine.sampling_params import SamplingParams
from flashlatte.engine.text_stream import TextStream
from flashlatte.engine.validation import Prompt


def generate(arguments: argparse.Namespace) -> int:
    """Continue a text, or answer it with ``--chat``; returns the exit code.

    The text is that of ``--prompt``, ``--file`` or standard input. ``--chat`` without a text answers each line of
    standard input, in one conversation.
    """
    # Only the first rank reads the text: all share one standard input.
    leads = os.environ.get("RANK", "0") == "0"
    text = _text(arguments) if leads else None
    sampling = SamplingParams(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        seed=arguments.seed,
        stop=arguments.stop,
    )
    # First, because transformers would look for a tokenizer of a missing directory on the network.
    config_of(arguments.model)
    tokenizer = load_tokenizer(arguments.model)
    # Before the weights are loaded, which takes long.
    if text is not None and not arguments.chat and not tokenizer.encode(text):
        raise ValueError("the text to continue must have at least one token, got none")
    engine = create_engine(arguments, tokenizer=tokenizer)
    if not engine.leads:
        engine.follow()
        return 0
    with engine:
        try:
            if arguments.chat:
                count = _answer(engine, _lines() if text is None else iter([text]), sampling)
            else:
                assert text is not None
                _, count = _stream(engine, text, sampling)
        except RequestFailed as error:
            print(f"\nflashlatte generate: {error}", file=sys.stderr)
            return 1
        seconds = engine.statistics()["seconds"]
    print(
        f"{count} tokens in {seconds:.1f} s, {count / max(seconds, 1e-9):,.1f} a second; "
        f"cache {engine.cache_format}, {engine.pool.num_pages} pages of {engine.pool.page_size} tokens",
        file=sys.stderr,
    )
    return 0


def _answer(engine: Engine, texts: Iterator[str], sampling: SamplingParams) -> int:
    """Answer the user's messages of one conversation; returns the number of generated tokens."""
    messages, total = list[dict[str, str]](), 0
    for text in texts:
        messages.append({"role": "user", "content": text})
        answer, count = _stream(engine, chat_tokens(engine.tokenizer, messages), sampling)
        messages.append({"role": "assistant", "content": answer})
        total += count
    return total


def _stream(engine: Engine, prompt: Prompt, sampling: SamplingParams) -> tuple[str, int]:
    """Print the text that continues a prompt; returns it, and its number of tokens without one that ended it."""
    engine.add(prompt, sampling)
    text, stream, output = "", None, None
    while engine.unfinished:
        for request in engine.step():
            (output,) = request.outputs
            stream = stream or TextStream(output)
            new = stream.update(output)
            text += new
            print(new, end="", flush=True)
    assert output is not None
    if output.error is not None:
        raise RequestFailed(f"request {request.request_id!r} failed: {output.error}")
    print()
    return text, len(output.token_ids) - _ended_by_token(output)


def _ended_by_token(output: CompletionOutput) -> bool:
    return output.token_ids[-1] in output.sampling.all_stop_token_ids


def _text(arguments: argparse.Namespace) -> str | None:
    """The text of the prompt; None for a conversation on standard input."""
    if arguments.prompt is not None:
        return arguments.prompt
    if arguments.file is None and arguments.chat:
        return None
    return _text_of(arguments.file or Path("-"))


def _text_of(file: Path) -> str:
    """The text of a file, or of standard input for "-"."""
    try:
        return (_standard_input().buffer.read() if str(file) == "-" else file.read_bytes()).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--file must be a text in UTF-8, and {file} is not: {error}") from None
    except OSError as error:
        raise ValueError(f"--file must be a file that can be read, got {file}: {error.strerror}") from None


def _lines() -> Iterator[str]:
    """The non-blank lines of standard input, with a prompt on a terminal."""
    is_terminal = _standard_input().isatty()
    with suppress(EOFError):
        while True:
            try:
                line = input("> " if is_terminal else "")
            except UnicodeDecodeError as error:
                raise ValueError(f"standard input must be a text in UTF-8, and is not: {error}") from None
            if line.strip():
                yield line


def _standard_input() -> TextIO:
    if sys.stdin is None:
        raise ValueError("a text must be given by --prompt, --file or standard input, which is closed")
    return sys.stdin
