"""Draw flashmla_in_turns.jsonl: FlashMLA's time over FlashLatte's, one named bar for each case."""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

HERE = Path(__file__).parent
FASTER, SLOWER = "#8d6e63", "#c62828"
OPERATIONS = ("dense_decode", "sparse_decode", "sparse_prefill")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, default=HERE / "flashmla_in_turns.jsonl")
    parser.add_argument("--picture", type=Path, default=HERE.parent / "docs" / "bench-flashmla-in-turns.png")
    arguments = parser.parse_args()
    cases = [json.loads(line) for line in arguments.data.read_text().splitlines()]
    draw(cases).savefig(arguments.picture, dpi=110)


def draw(cases: list[dict]) -> Figure:
    """Horizontal bars that begin at 1: dense decode on the left, the sparse operations on the right."""
    lines = {op: [line for line in cases if line["op"] == op] for op in OPERATIONS}
    figure = Figure(figsize=(12.5, 6.2), layout="constrained")
    left, right = figure.add_gridspec(1, 2)
    # A panel is as high as its bars and one more, for its title.
    below = right.subgridspec(2, 1, height_ratios=[len(lines[op]) + 1 for op in OPERATIONS[1:]])
    for op, place in zip(OPERATIONS, (left, below[0], below[1]), strict=True):
        draw_operation(figure.add_subplot(place), op, lines[op])
    first = cases[0]
    mean = statistics.geometric_mean(line["ratio"] for line in cases)
    ahead = sum(line["ratio"] > 1 for line in cases)
    figure.suptitle(
        f"FlashMLA's time / FlashLatte's (above 1 FlashLatte is faster): faster in {ahead} of {len(cases)} cases, "
        f"geometric mean {mean:.3f}\none {first['device']}, both alternating in one process, "
        f"FlashLatte {first['commit']}, FlashMLA {first['flashmla_commit']}, {first['date']}",
        fontsize=11,
    )
    return figure


def draw_operation(axes: Any, op: str, lines: list[dict]) -> None:
    lines = sorted(lines, key=lambda line: line["ratio"])
    ratios = [line["ratio"] for line in lines]
    colors = [FASTER if ratio > 1 else SLOWER for ratio in ratios]
    names = [line["case"] + " graph" * (line["method"] == "graph") for line in lines]
    axes.barh(range(len(lines)), [ratio - 1 for ratio in ratios], left=1, color=colors, height=0.75)
    axes.set_yticks(range(len(lines)), names)
    for row, ratio in enumerate(ratios):
        axes.text(max(ratio, 1) + 0.01, row, f"{ratio:.2f}", va="center", fontsize=8)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_xlim(0.8, 2.1)
    axes.set_ylim(-0.6, len(lines) - 0.4)
    axes.set_title(f"{op.replace('_', ' ')}: {statistics.geometric_mean(ratios):.2f}", fontsize=10)
    axes.tick_params(labelsize=8)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
