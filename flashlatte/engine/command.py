"""``flashlatte generate``: streams a text, and ends with the engine's statistics."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from flashlatte.engine.detokenizer import Detokenizer
from flashlatte.engine.engine import Engine
from flashlatte.engine.paged import config_of
from flashlatte.engine.sampling import SamplingParams


def generate(arguments: argparse.Namespace) -> int:
    """Continue the text of ``--prompt`` or ``--file``; returns the exit code."""
    # Other ranks need no text, and share standard input with the first.
    leads = os.environ.get("RANK", "0") == "0"
    text = arguments.prompt if arguments.file is None or not leads else _text_of(arguments.file)
    sampling = SamplingParams(
        arguments.new_tokens, temperature=arguments.temperature, top_p=arguments.top_p, seed=arguments.seed
    )
    # First, as transformers looks for the tokenizer of no directory in the network.
    config_of(arguments.model)
    engine = Engine(
        arguments.model,
        cache_format=arguments.cache_format,
        tokenizer=_tokenizer(arguments.model),
        # As many processes as torchrun started.
        tensor_parallel=int(os.environ.get("WORLD_SIZE", "1")),
        context_parallel=arguments.context_parallel,
    )
    if not engine.leads:
        engine.follow()
        return 0
    with engine:
        _stream(engine, text, sampling)
    return 0


def _stream(engine: Engine, text: str, sampling: SamplingParams) -> None:
    shown, count = Detokenizer(engine.tokenizer), 0
    for token in engine.stream(text, sampling):
        if token not in engine.model.eos_token_ids:
            print(shown.add(token)[0], end="", flush=True)
            count += 1
    statistics = engine.statistics()
    print(shown.rest())
    print(
        f"{count} tokens in {statistics['seconds']:.1f} s, {count / statistics['seconds']:,.1f} a second; "
        f"cache {engine.cache_format}, {engine.pool.num_pages} pages of {engine.pool.page_size} tokens",
        file=sys.stderr,
    )


def _text_of(file: Path) -> str:
    """The text of a file, or of standard input for "-"."""
    try:
        return (sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--file must be a text in UTF-8, and {file} is not: {error}") from None
    except OSError as error:
        raise ValueError(f"--file must be a file that can be read, got {file}: {error.strerror}") from None


def _tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # of many kinds: transformers tries one tokenizer after another
        reason = " ".join(str(error).split())
        raise ValueError(
            f"model must be a directory with a tokenizer, and transformers loads none from {path}: {reason}"
        ) from error
