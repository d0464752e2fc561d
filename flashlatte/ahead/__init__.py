"""``flashlatte compile``: the kernels that a model's steps launch, compiled into Triton's cache before they begin."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``flashlatte compile`` to a parser."""
    parser.add_argument(
        "--model", type=Path, metavar="CONFIG.json", required=True, help="the model's config (or its folder)"
    )
    parser.add_argument(
        "--cache-format",
        action="append",
        metavar="FORMAT",
        help="of the cache (may be repeated); default: the dtype, or model1 for DeepSeek-V4",
    )
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16", help="of the weights (default bf16)")
    parser.add_argument("--max-batch", type=int, default=256, help="requests of a decode step at most (default 256)")
    parser.add_argument(
        "--max-queries", type=int, default=2, help="new tokens of a request in such a step at most (default 2)"
    )
    parser.add_argument("--page-size", type=int, default=64, help="tokens in a page (default 64)")
    parser.add_argument(
        "--tensor-parallel", type=int, default=1, metavar="N", help="ranks that the heads are divided over (default 1)"
    )
    parser.add_argument("--target", metavar="sm_90", help="another GPU than this machine's, which may have none")
    parser.add_argument("--sms", type=int, help="that GPU's SMs; default: those of the largest of its kind")
    parser.add_argument("--jobs", type=int, help="compile with so many processes (default: one a processor)")
    parser.add_argument("--list", action="store_true", help="name the kernels and compile none")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def main(arguments: argparse.Namespace) -> int:
    """Run ``flashlatte compile``; returns its exit code."""
    from flashlatte.ahead import command

    return command.run(arguments)
