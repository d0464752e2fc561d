"""Error of attention over quantized caches relative to bf16, by length."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

from flashlatte.bench.pictures import latest_run, plain

COLORS = {
    "fp8": "#bdbdbd",
    "fp8, token and head": "#757575",
    "int8, token and head": "#212121",
    "turboquant_k8v4": "#00695c",
    "turboquant_4bit_nc": "#26a69a",
    "turboquant_k3v4_nc": "#fb8c00",
    "turboquant_3bit_nc": "#d84315",
}


def draw(lines: list[dict[str, Any]]) -> Figure:
    lines = [line for line in latest_run(lines) if line["cache"] != "bf16"]
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, color in COLORS.items():
        own = [line for line in lines if line["cache"] == name]
        lengths, label = [line["length"] for line in own], f"{name} ({own[0]['bytes']} bytes)"
        left.plot(lengths, [1 - line["cosine"] for line in own], "o-", color=color, label=label)
        right.plot(lengths, [line["largest_error"] for line in own], "o-", color=color)
    for axes, what in ((left, "1 − cosine similarity"), (right, "largest error / rms of the output")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("tokens of a request")
        axes.set_ylabel(what)
        plain(axes)
    figure.legend(*left.get_legend_handles_labels(), frameon=False, loc="outside right center", fontsize=8)
    return figure
