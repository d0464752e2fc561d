"""FlashMLA's time over FlashLatte's, one named bar for each case."""

from __future__ import annotations

import statistics
from typing import Any

from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

from flashlatte.bench.pictures import plain
from flashlatte.bench.results import newest_runs

FASTER, SLOWER = "#8d6e63", "#c62828"
OPERATIONS = ("dense_decode", "sparse_decode", "sparse_prefill")


def draw(results: list[dict[str, Any]]) -> Figure:
    """Horizontal bars of the newest run, which begin at 1: dense decode on the left, the sparse operations on the
    right.
    """
    cases = newest_runs(results)[-1]
    lines = {op: [line for line in cases if line["op"] == op] for op in OPERATIONS}
    figure = Figure(figsize=(12.5, 6.2), layout="constrained")
    left, right = figure.add_gridspec(1, 2)
    # The height of a panel is that of its bars and one more for the title.
    below = right.subgridspec(2, 1, height_ratios=[len(lines[op]) + 1 for op in OPERATIONS[1:]])
    for op, cell in zip(OPERATIONS, (left, below[0], below[1]), strict=True):
        draw_operation(figure.add_subplot(cell), op, lines[op])
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


def draw_operation(axes: Any, op: str, lines: list[dict[str, Any]]) -> None:
    lines = sorted(lines, key=lambda line: line["ratio"])
    ratios = [line["ratio"] for line in lines]
    colors = [FASTER if ratio > 1 else SLOWER for ratio in ratios]
    names = [line["case"] + " graph" * (line["method"] == "graph") for line in lines]
    axes.barh(range(len(lines)), [ratio - 1 for ratio in ratios], left=1, color=colors, height=0.75)
    axes.set_yticks(range(len(lines)), names)
    for row, ratio in enumerate(ratios):
        axes.text(max(ratio, 1) + 0.01, row, f"{ratio:.2f}", va="center", fontsize=8)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_xlim(min(0.8, *ratios), max(2.0, *ratios) + 0.1)
    axes.set_ylim(-0.6, len(lines) - 0.4)
    axes.set_title(f"{op.replace('_', ' ')}: {statistics.geometric_mean(ratios):.2f}", fontsize=10)
    axes.tick_params(labelsize=8)
    plain(axes, grid="x")
