"""Pictures of results in docs/, one module for each. Here: the look of axes, and the lines of one run."""

from __future__ import annotations

from typing import Any


def plain(axes: Any, grid: str = "both") -> None:
    """A light grid below the data, and no frame at the top and right."""
    axes.grid(axis=grid, alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def latest_run(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of the last run: times of two runs, or of two GPUs, are not comparable."""
    run = ("device", "commit", "date")
    return [line for line in steps if all(line.get(fact) == steps[-1].get(fact) for fact in run)]
