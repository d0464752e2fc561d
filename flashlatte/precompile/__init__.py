"""``flashlatte compile``: compiles the kernels of a model's steps into Triton's cache ahead of time."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``flashlatte compile`` to a parser."""
    parser.add_argument(
        "--model", type=Path, metavar="CONFIG.json", required=True, help="the model's config.json, or its directory"
    )
    parser.add_argument(
        "--cache-format",
        action="append",
        metavar="FORMAT",
        help="cache format (may be repeated); default: the dtype, or model1 for DeepSeek-V4",
    )
    parser.add_argument(
        "--decode-precision", choices=("fp8",), help="decode over an fp8 cache in e4m3 (default: exact products)"
    )
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16", help="dtype of the weights (default bf16)")
    parser.add_argument("--max-batch", type=int, default=256, help="maximum requests of a decode step (default 256)")
    parser.add_argument(
        "--max-queries", type=int, default=2, help="maximum new tokens of a request in a decode step (default 2)"
    )
    parser.add_argument("--page-size", type=int, default=64, help="tokens in a page (default 64)")
    parser.add_argument(
        "--tensor-parallel", type=int, default=1, metavar="N", help="number of tensor-parallel ranks (default 1)"
    )
    parser.add_argument("--target", metavar="sm_90", help="target GPU; default: this machine's GPU")
    parser.add_argument("--sms", type=int, help="SMs of the target GPU; default: those of the largest such GPU")
    parser.add_argument("--jobs", type=int, help="number of processes (default: one for each processor)")
    parser.add_argument("--list", action="store_true", help="list the kernels without compiling them")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def main(arguments: argparse.Namespace) -> int:
    """Run ``flashlatte compile``; returns its exit code."""
    from flashlatte.precompile import command

    return command.run(arguments)
