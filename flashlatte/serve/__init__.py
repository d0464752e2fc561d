"""``flashlatte serve``: OpenAI's HTTP API over the engine.

``command`` starts the engine and uvicorn. ``app`` has the routes. A request's body is parsed in ``completions`` or
``chat`` to a ``GenerationJob`` (over ``fields`` and ``sampling``), and answered in ``generation``. Importing this does
not import torch.
"""

from __future__ import annotations

import argparse

from flashlatte.engine.arguments import add_model_arguments

EXTRA_HINT = "pip install 'flashlatte[serve]'"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``flashlatte serve`` to a parser."""
    add_model_arguments(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default 127.0.0.1: this machine)")
    parser.add_argument("--port", type=int, default=8000, help="port (default 8000); 0 takes a free one")
    parser.add_argument(
        "--api-key", help="key that clients must send; default: the environment variable FLASHLATTE_API_KEY, or none"
    )
    parser.add_argument(
        "--served-model-name", metavar="NAME", help="the model's name in the API; default: the directory's name"
    )
    parser.add_argument(
        "--max-model-len",
        type=int,
        metavar="TOKENS",
        help="maximum number of tokens of a prompt and its output; default: what the model and the cache allow",
    )
    parser.add_argument(
        "--max-queue",
        type=int,
        default=256,
        metavar="N",
        help="outputs that wait beyond --max-num-seqs; more are refused with status 429 (default 256)",
    )
    parser.add_argument(
        "--max-body-bytes", type=int, default=4 << 20, metavar="N", help="maximum size of a body (default 4 MiB)"
    )
    parser.add_argument(
        "--drain-seconds",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="time that running requests have to end when the server is stopped (default 30)",
    )
    for name, default, text in (
        ("num-pages", None, "pages of the cache; default: 0.8 of a GPU's free memory, or 16,384 tokens on a CPU"),
        ("page-size", None, "tokens in a page; default: the model's"),
        ("swap-space", 0, "pages on the host for preempted requests; 0 (default): they are recomputed"),
        ("max-num-batched-tokens", 2048, "maximum number of tokens in a step (default 2048)"),
        ("max-num-seqs", 64, "maximum number of outputs that run at a time (default 64)"),
        ("num-speculative-tokens", 0, "draft tokens per step, by prompt lookup (default 0)"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=text)


def main(arguments: argparse.Namespace) -> int:
    """Run ``flashlatte serve``; returns its exit code."""
    try:
        from flashlatte.serve import command
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("uvicorn", "starlette", "prometheus_client"):
            raise
        raise ModuleNotFoundError(f"the server needs {error.name}: {EXTRA_HINT}") from error
    return command.run(arguments)
