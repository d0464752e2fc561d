"""``flashlatte generate``: streams a text, then prints the speed."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from flashlatte.engine.detokenizer import Detokenizer
from flashlatte.engine.engine import Engine
from flashlatte.engine.loading import load_tokenizer
from flashlatte.engine.outputs import RequestFailed
from flashlatte.engine.paged import config_of
from flashlatte.engine.sampling_params import SamplingParams


def generate(arguments: argparse.Namespace) -> int:
    """Continue the text of ``--prompt`` or ``--file``; returns the exit code."""
    # Only the first rank reads the text: all share one standard input.
    leads = os.environ.get("RANK", "0") == "0"
    text = arguments.prompt if arguments.file is None or not leads else _text_of(arguments.file)
    sampling = SamplingParams(
        max_tokens=arguments.max_tokens, temperature=arguments.temperature, top_p=arguments.top_p, seed=arguments.seed
    )
    # First, because transformers would look for a tokenizer of a missing directory on the network.
    config_of(arguments.model)
    engine = Engine(
        arguments.model,
        cache_format=arguments.cache_format,
        tokenizer=load_tokenizer(arguments.model),
        # As many processes as torchrun started.
        tensor_parallel=int(os.environ.get("WORLD_SIZE", "1")),
        context_parallel=arguments.context_parallel,
    )
    if not engine.leads:
        engine.follow()
        return 0
    with engine:
        try:
            _stream(engine, text, sampling)
        except RequestFailed as error:
            print(f"\nflashlatte generate: {error}", file=sys.stderr)
            return 1
    return 0


def _stream(engine: Engine, text: str, sampling: SamplingParams) -> None:
    detokenizer, count = Detokenizer(engine.tokenizer), 0
    for token in engine.stream(text, sampling):
        if token not in engine.model.eos_token_ids:
            print(detokenizer.add(token)[0], end="", flush=True)
            count += 1
    statistics = engine.statistics()
    print(detokenizer.rest())
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
