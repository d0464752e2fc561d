"""Draw results in benchmarks/results/ as pictures in docs/ (the cases of the bench list: ``flashlatte bench --plot``).

flashlatte bench plot [NAME ...] [--data FILE] [--picture FILE] [--device NAME]
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from flashlatte.bench.environment import in_checkout
from flashlatte.bench.results import read_lines

# Picture: its module, results and file.
PICTURES = {
    "flashmla": ("flashmla", "flashmla_in_turns.jsonl", "bench-flashmla-in-turns.png"),
    "cost-growth": ("cost_growth", "cost_growth.jsonl", "bench-cost-growth.png"),
    "distributed": ("distributed", "h200-several.jsonl", "bench-distributed.png"),
    "dsa-layer": ("dsa_layer", "dsa_layer.jsonl", "bench-dsa-layer.png"),
    "cache-quantization": ("cache_quantization", "cache_quantization.jsonl", "bench-cache-quantization.png"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(PICTURES)}; default: all")
    parser.add_argument(
        "--data", type=Path, metavar="FILE", help="file of results; default: those in benchmarks/results/"
    )
    parser.add_argument("--device", default="", metavar="NAME", help="only results of devices whose name has NAME")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="file to write; default: the picture in docs/")


def run(options: argparse.Namespace) -> int:
    names = options.names or list(PICTURES)
    if unknown := set(names) - set(PICTURES):
        raise ValueError(f"no picture named {', '.join(sorted(unknown))}; there are {', '.join(PICTURES)}")
    if (options.data or options.picture) and len(names) != 1:
        raise ValueError("--data and --picture need one NAME")
    for name in names:
        module, results, picture = PICTURES[name]
        draw = importlib.import_module(f"flashlatte.bench.pictures.{module}").draw
        data = options.data or in_checkout(Path("benchmarks", "results", results))
        path = options.picture or in_checkout(Path("docs", picture))
        lines = [line for line in read_lines([data]) if options.device in line.get("device", "")]
        if not lines:
            raise ValueError(f"{data} has no results of {options.device or 'any device'}")
        draw(lines).savefig(path, dpi=110)
        print(path)
    return 0
