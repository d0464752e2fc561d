"""Draw flashmla_in_turns.jsonl: FlashMLA's time over FlashLatte's, a bar for each case."""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from pathlib import Path

from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

HERE = Path(__file__).parent
BAR = "#8d6e63"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, default=HERE / "flashmla_in_turns.jsonl")
    parser.add_argument("--picture", type=Path, default=HERE.parent / "docs" / "bench-flashmla-in-turns.png")
    arguments = parser.parse_args()
    cases = [json.loads(line) for line in arguments.data.read_text().splitlines()]
    draw(cases).savefig(arguments.picture, dpi=110)


def draw(cases: list[dict]) -> Figure:
    """Bars from 1, grouped by operation, the largest first; FlashLatte is faster where they point up."""
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    axes = figure.subplots()
    left = 0.0
    for operation, lines in itertools.groupby(cases, key=lambda line: line["op"]):
        ratios = sorted((line["ratio"] for line in lines), reverse=True)
        places = [left + place for place in range(len(ratios))]
        axes.bar(places, [ratio - 1 for ratio in ratios], bottom=1, color=BAR, width=0.8)
        mean = statistics.geometric_mean(ratios)
        axes.text((places[0] + places[-1]) / 2, 2.02, f"{operation}: {mean:.2f}", ha="center", va="bottom")
        left += len(ratios) + 1.5
    axes.axhline(1.0, color="black", linewidth=1)
    axes.set_ylim(0.9, 2.0)
    axes.set_xticks([])
    axes.set_ylabel("FlashMLA's time / FlashLatte's")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    first = cases[0]
    overall = statistics.geometric_mean(line["ratio"] for line in cases)
    axes.set_xlabel(
        f"{len(cases)} cases on one {first['device']}, timed in turns, commit {first['commit']}, {first['date']}\n"
        f"geometric mean {overall:.3f}, above 1 FlashLatte is faster"
    )
    return figure


if __name__ == "__main__":
    main()
