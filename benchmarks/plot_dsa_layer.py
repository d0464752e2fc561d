"""Draw dsa_layer.jsonl: a decode step by the context's length, sparse and dense; prints where sparse begins to win."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

HERE = Path(__file__).parent
COLOURS = {("sparse", "v32"): "#00695c", ("sparse", "bf16"): "#80cbc4", ("dense", "bf16"): "#8d6e63"}
Curve = dict[int, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, default=HERE / "dsa_layer.jsonl")
    parser.add_argument("--picture", type=Path, default=HERE.parent / "docs" / "bench-dsa-layer.png")
    arguments = parser.parse_args()
    lines = [json.loads(line) for line in arguments.data.read_text().splitlines()]
    steps = latest_run([line for line in lines if line["what"] == "decode"])
    for batch, curves in curves_of(steps).items():
        dense = curves["dense", "bf16"]
        for kind in (("sparse", "v32"), ("sparse", "bf16")):
            print(f"batch {batch}: {' over '.join(kind)} wins from {crossing(curves[kind], dense)} tokens on")
    draw(curves_of(steps), steps[0]).savefig(arguments.picture, dpi=110)


def latest_run(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of the last run: times of two runs, or of two GPUs, do not make one curve."""
    run = ("device", "commit", "date")
    return [line for line in steps if all(line[fact] == steps[-1][fact] for fact in run)]


def curves_of(steps: list[dict[str, Any]]) -> dict[int, dict[tuple[str, str], Curve]]:
    """Microseconds by keys, of each batch and kind of attention; of a step that was measured twice the later one."""
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


def draw(batches: dict[int, dict[tuple[str, str], Curve]], facts: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    for axes, (batch, curves) in zip(figure.subplots(1, len(batches), squeeze=False)[0], batches.items(), strict=True):
        for kind, curve in curves.items():
            keys = sorted(curve)
            axes.plot(keys, [curve[key] for key in keys], "o-", color=COLOURS[kind], label=" over ".join(kind))
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.set_title(f"{batch} requests")
        axes.set_xlabel("tokens of a request")
        axes.set_ylabel("µs, one layer's decode step")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.suptitle(
        f"DeepSeek-V3.2's layer on one {facts['device']}, commit {facts['commit']}, {facts['date']}", fontsize=9
    )
    return figure


if __name__ == "__main__":
    main()
