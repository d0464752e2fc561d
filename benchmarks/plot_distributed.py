"""Draw h200-several.jsonl: decode over keys on several GPUs, times faster than on one, by the context's length."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

HERE = Path(__file__).parent
COLOURS = {2: "#80cbc4", 4: "#00695c", 8: "#8d6e63"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, default=HERE / "results" / "h200-several.jsonl")
    parser.add_argument("--picture", type=Path, default=HERE.parent / "docs" / "bench-distributed.png")
    arguments = parser.parse_args()
    lines = [json.loads(line) for line in arguments.data.read_text().splitlines()]
    curves: dict[int, dict[int, float]] = {}
    for line in lines:
        if line.get("case") == "curve" and line["what"] == "direct":
            curves.setdefault(line["gpus"], {})[line["keys"]] = line["times one GPU"]
    if not curves:
        raise SystemExit(f"{arguments.data} has no lines of benchmarks/distributed.py --case curve")
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    for gpus, curve in sorted(curves.items()):
        colour, keys = COLOURS.get(gpus), sorted(curve)
        axes.plot(keys, [curve[key] for key in keys], "o-", color=colour, label=f"{gpus} GPUs")
        axes.axhline(gpus, color=colour, linestyle=":", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens of a request")
    axes.set_ylabel("times one GPU")
    axes.legend(frameon=False)
    figure.savefig(arguments.picture, dpi=110)


if __name__ == "__main__":
    main()
