"""Decode with keys divided over several GPUs: speedup over one GPU by the length of the context."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

COLORS = {2: "#80cbc4", 4: "#00695c", 8: "#8d6e63"}


def draw(lines: list[dict[str, Any]]) -> Figure:
    curves: dict[int, dict[int, float]] = {}
    for line in lines:
        if line.get("case") == "curve" and line["what"] == "direct":
            curves.setdefault(line["gpus"], {})[line["keys"]] = line["times one GPU"]
    if not curves:
        raise ValueError("there are no lines of flashlatte bench distributed-decode --case curve")
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    for gpus, curve in sorted(curves.items()):
        color, keys = COLORS.get(gpus), sorted(curve)
        axes.plot(keys, [curve[key] for key in keys], "o-", color=color, label=f"{gpus} GPUs")
        axes.axhline(gpus, color=color, linestyle=":", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens of a request")
    axes.set_ylabel("times one GPU")
    axes.legend(frameon=False)
    return figure
