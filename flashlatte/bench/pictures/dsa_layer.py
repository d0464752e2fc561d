"""A decode step by the length of the context, sparse and dense; prints the length from which sparse is faster."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

from flashlatte.bench.pictures import latest_run, plain

COLORS = {("sparse", "v32"): "#00695c", ("sparse", "bf16"): "#80cbc4", ("dense", "bf16"): "#8d6e63"}
Curve = dict[int, float]


def curves_of(steps: list[dict[str, Any]]) -> dict[int, dict[tuple[str, str], Curve]]:
    """Microseconds by keys, for each batch and kind of attention; a later measurement replaces an earlier one."""
    found: dict[int, dict[tuple[str, str], Curve]] = {}
    for line in steps:
        kind = line["attention"], line["cache_format"]
        found.setdefault(line["batch"], {}).setdefault(kind, {})[line["keys"]] = line["step_us"]
    return found


def crossing(sparse: Curve, dense: Curve) -> int | None:
    """The smallest measured length from which on sparse is faster at every length."""
    wins = None
    for keys in sorted(sparse.keys() & dense.keys(), reverse=True):
        if sparse[keys] >= dense[keys]:
            break
        wins = keys
    return wins


def draw(lines: list[dict[str, Any]]) -> Figure:
    steps = latest_run([line for line in lines if line["what"] == "decode"])
    facts, batches = steps[0], curves_of(steps)
    for batch, curves in batches.items():
        for kind in (("sparse", "v32"), ("sparse", "bf16")):
            first = crossing(curves[kind], curves["dense", "bf16"])
            print(f"batch {batch}: {' over '.join(kind)} is faster from {first} tokens on")
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    for axes, (batch, curves) in zip(figure.subplots(1, len(batches), squeeze=False)[0], batches.items(), strict=True):
        for kind, curve in curves.items():
            keys = sorted(curve)
            axes.plot(keys, [curve[key] for key in keys], "o-", color=COLORS[kind], label=" over ".join(kind))
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.set_title(f"{batch} requests")
        axes.set_xlabel("tokens of a request")
        axes.set_ylabel("µs, one layer's decode step")
        plain(axes)
        axes.legend(frameon=False)
    figure.suptitle(
        f"DeepSeek-V3.2's layer on one {facts['device']}, commit {facts['commit']}, {facts['date']}", fontsize=9
    )
    return figure
