"""Draw cost_growth.jsonl: what a key costs, by how many there are in all requests together."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from matplotlib import colormaps  # pyright: ignore[reportMissingImports]
from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]
from plot_dsa_layer import latest_run

HERE = Path(__file__).parent
GREY = "#9e9e9e"
# Of heads: requests: (keys of all requests, nanoseconds a key).
Curves = dict[int, dict[int, list[tuple[int, float]]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, default=HERE / "results" / "cost_growth.jsonl")
    parser.add_argument("--picture", type=Path, default=HERE.parent / "docs" / "bench-cost-growth.png")
    arguments = parser.parse_args()
    lines = latest_run([json.loads(line) for line in arguments.data.read_text().splitlines()])
    figure = draw(curves_of(lines, "hopper"), curves_of(lines, "flashmla"), lines[0]["device"])
    figure.savefig(arguments.picture, dpi=110)


def curves_of(lines: list[dict[str, Any]], backend: str) -> Curves:
    found: Curves = {}
    for line in lines:
        sizes = re.fullmatch(r"b(\d+)-sq1-h(\d+)-k(\d+)", line["case"])
        if sizes is not None and line["backend"] == backend:
            batch, heads, keys = map(int, sizes.groups())
            point = batch * keys, 1000 * line["us"] / (batch * keys)
            found.setdefault(heads, {}).setdefault(batch, []).append(point)
    return found


def draw(ours: Curves, flashmla: Curves, device: str) -> Figure:
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    panels = figure.subplots(1, len(ours), sharey=True)
    for axes, (heads, curves) in zip(panels, ours.items(), strict=True):
        for number, (batch, points) in enumerate(curves.items()):
            axes.plot(*zip(*flashmla[heads][batch], strict=True), ":", color=GREY, linewidth=1)
            colour = colormaps["viridis"](number / len(curves))
            axes.plot(*zip(*points, strict=True), "o-", color=colour, markersize=3, linewidth=1, label=f"b {batch}")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title(f"{heads} heads", fontsize=10)
        axes.set_xlabel("keys of all requests")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel(f"ns a key, {device}")
    panels[-1].plot([], [], ":", color=GREY, label="FlashMLA")
    figure.legend(*panels[-1].get_legend_handles_labels(), frameon=False, loc="outside right center", fontsize=8)
    return figure


if __name__ == "__main__":
    main()
