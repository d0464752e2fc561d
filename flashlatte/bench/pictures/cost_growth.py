"""The cost per key of dense decode, by the keys of all requests together."""

from __future__ import annotations

import re
from typing import Any

from matplotlib import colormaps  # pyright: ignore[reportMissingImports]
from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

from flashlatte.bench.pictures import latest_run, plain

GREY = "#9e9e9e"
# By heads and requests: (keys of all requests, nanoseconds per key).
Curves = dict[int, dict[int, list[tuple[int, float]]]]


def curves_of(lines: list[dict[str, Any]], backend: str) -> Curves:
    found: Curves = {}
    for line in lines:
        sizes = re.fullmatch(r"b(\d+)-sq1-h(\d+)-k(\d+)", line["case"])
        if sizes is not None and line["backend"] == backend:
            batch, heads, keys = map(int, sizes.groups())
            point = batch * keys, 1000 * line["us"] / (batch * keys)
            found.setdefault(heads, {}).setdefault(batch, []).append(point)
    return found


def draw(lines: list[dict[str, Any]]) -> Figure:
    lines = latest_run(lines)
    ours, flashmla = curves_of(lines, "hopper"), curves_of(lines, "flashmla")
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    panels = figure.subplots(1, len(ours), sharey=True)
    for axes, (heads, curves) in zip(panels, ours.items(), strict=True):
        for number, (batch, points) in enumerate(curves.items()):
            axes.plot(*zip(*flashmla[heads][batch], strict=True), ":", color=GREY, linewidth=1)
            color = colormaps["viridis"](number / len(curves))
            axes.plot(*zip(*points, strict=True), "o-", color=color, markersize=3, linewidth=1, label=f"b {batch}")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title(f"{heads} heads", fontsize=10)
        axes.set_xlabel("keys of all requests")
        plain(axes)
    panels[0].set_ylabel(f"ns a key, {lines[0]['device']}")
    panels[-1].plot([], [], ":", color=GREY, label="FlashMLA")
    figure.legend(*panels[-1].get_legend_handles_labels(), frameon=False, loc="outside right center", fontsize=8)
    return figure
