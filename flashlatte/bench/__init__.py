"""``flashlatte bench``: how fast each operation is on this machine, beside what the chip and FlashMLA reach."""

from __future__ import annotations

import argparse
import sys

EXTRA_HINT = "pip install 'flashlatte[bench]'"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``flashlatte bench`` to a parser."""
    parser.add_argument("--op", action="append", metavar="NAME", help="only this operation (may be repeated)")
    parser.add_argument(
        "--case", action="append", metavar="NAME", help="only this case; * and ? match any letters (may be repeated)"
    )
    parser.add_argument(
        "--backend",
        action="append",
        metavar="NAME",
        help="hopper, portable or reference (may be repeated); default: all that have kernels for the GPU",
    )
    parser.add_argument("--json", metavar="FILE", help="append one JSON line a result to FILE, or print them for -")
    parser.add_argument(
        "--record", action="store_true", help="append the right results to benchmarks/results/<gpu>.jsonl (a checkout)"
    )
    parser.add_argument("--list", action="store_true", help="print the cases and what FlashMLA was recorded at")
    parser.add_argument(
        "--plot", action="store_true", help="draw benchmarks/results/*.jsonl into docs/; without --record runs nothing"
    )


def main(args: argparse.Namespace) -> int:
    """Run ``flashlatte bench``.

    Returns:
        0; 1 if a result was wrong or a case failed; 2 if the request cannot be met (an unknown name, a missing extra).
    """
    from flashlatte.bench import command

    try:
        return command.run(args)
    except command.Refused as refusal:
        print(f"flashlatte bench: {refusal}", file=sys.stderr)
        return 2
