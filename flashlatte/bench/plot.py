"""One picture per operation: each case's share of the matmul or copy, and its speed relative to FlashMLA's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd  # pyright: ignore[reportMissingImports]
from matplotlib.axes import Axes  # pyright: ignore[reportMissingImports]
from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

from flashlatte.bench.environment import gpu_slug
from flashlatte.bench.results import read_newest

ROW_INCHES, HEAD_INCHES, WIDTH_INCHES = 0.3, 1.6, 11.0
CHIP, FLASHMLA, FLASHMLA_CHIP = "share of the chip", "speed over FlashMLA's", "FlashMLA's share of the chip"
# The same implementation has the same color in every picture.
COLORS = {"hopper": "tab:blue", "portable": "tab:orange", "reference": "tab:gray"}
OTHER_COLOR = "tab:green"
# GPUs, in the order of the alphabet.
HATCHES = ("", "//", "..", "xx")


def draw(paths: Sequence[Path], folder: Path) -> list[Path]:
    """Draw bench-<operation>.png into ``folder`` from these JSON-lines files; returns the pictures drawn."""
    frame = table(read_newest(paths))
    if frame.empty:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    pictures = []
    for operation, rows in frame.groupby("op", sort=False):
        picture = folder / f"bench-{str(operation).replace('.', '-').replace('_', '-')}.png"
        figure(str(operation), rows).savefig(picture, dpi=110)
        pictures.append(picture)
    return pictures


def table(lines: Sequence[dict]) -> pd.DataFrame:
    """A row for each result of a GPU that is drawn: operation, case, series and shares."""
    return pd.DataFrame([_row(line) for line in lines if line["method"] != "host" and not line["scaled_down"]])


def _row(line: dict) -> dict:
    share, speed = _largest(line["share_of_matmul"], line["share_of_copy"]), line["share_of_flashmla"]
    return {
        "op": line["op"],
        "case": line["case"],
        "series": f"{line['backend']}, {gpu_slug(line['device']).upper()}",
        CHIP: share,
        FLASHMLA: speed,
        # The same work in FlashMLA's time, relative to the same matmul and copy.
        FLASHMLA_CHIP: share / speed if share and speed else None,
    }


def figure(operation: str, rows: pd.DataFrame) -> Figure:
    """The picture of one operation's rows."""
    cases = list(dict.fromkeys(rows["case"]))
    compared = bool(rows[FLASHMLA].notna().to_numpy().any())
    height = HEAD_INCHES + ROW_INCHES * len(cases) * max(len(set(rows["series"])) / 2, 1)
    drawn = Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
    axes = drawn.subplots(1, 2 if compared else 1, sharey=True, squeeze=False)[0]
    drawn.suptitle(operation)

    _bars(axes[0], rows, cases, CHIP)
    axes[0].set_xlabel("share of the run's matmul or copy, the larger one")
    # Each implementation was timed in its own run; the mark is relative to the fastest one's.
    fastest = rows.sort_values(FLASHMLA, ascending=False).drop_duplicates("case").set_index("case")
    markers = fastest[FLASHMLA_CHIP].reindex(cases).to_numpy(dtype=float)
    if compared:
        axes[0].plot(markers, range(len(cases)), "k|", markersize=11, label="the same work in FlashMLA's time")
    drawn.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    if compared:
        _bars(axes[1], rows, cases, FLASHMLA)
        axes[1].axvline(1.0, color="black", linewidth=1)
        axes[1].set_xlabel("FlashMLA's recorded time over this one")
    return drawn


def _bars(axes: Axes, rows: pd.DataFrame, cases: list[str], column: str) -> None:
    shares = rows.pivot_table(index="case", columns="series", values=column, sort=False, observed=True)
    shares = shares.reindex(cases)
    series = [str(name).partition(", ") for name in shares.columns]
    colors = [COLORS.get(backend, OTHER_COLOR) for backend, _, _ in series]
    shares.plot.barh(ax=axes, width=0.75, legend=False, color=colors)
    gpus = sorted({gpu for _, _, gpu in series})
    for bars, (_, _, gpu) in zip(axes.containers, series, strict=True):
        for bar in bars:
            bar.set_hatch(HATCHES[gpus.index(gpu) % len(HATCHES)])
    if not axes.yaxis_inverted():
        axes.invert_yaxis()
    axes.set_ylabel("")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def _largest(*shares: float | None) -> float | None:
    return max((share for share in shares if share is not None), default=None)
