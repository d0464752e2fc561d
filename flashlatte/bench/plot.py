"""One picture an operation: how near each case comes to what the chip gives, and to FlashMLA."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd  # pyright: ignore[reportMissingImports]
from matplotlib.axes import Axes  # pyright: ignore[reportMissingImports]
from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

from flashlatte.bench.cases import RECORDED_COPY_GBPS, RECORDED_MATMUL_TFLOPS
from flashlatte.bench.environment import gpu_slug
from flashlatte.bench.results import read_newest

ROW_INCHES, HEAD_INCHES, WIDTH_INCHES = 0.3, 1.6, 11.0
CHIP, FLASHMLA, FLASHMLA_CHIP = "share of the chip", "speed over FlashMLA's", "FlashMLA's share of the chip"


def draw(paths: Sequence[Path], folder: Path) -> list[Path]:
    """Draw bench-<operation>.png into ``folder`` from these JSON-lines files; returns the pictures drawn."""
    lines = [line for line in read_newest(paths) if line["method"] != "host" and not line["scaled_down"]]
    if not lines:
        return []
    frame = pd.DataFrame([_row(line) for line in lines])
    folder.mkdir(parents=True, exist_ok=True)
    pictures = []
    for operation, rows in frame.groupby("op", sort=False):
        picture = folder / f"bench-{str(operation).replace('.', '-').replace('_', '-')}.png"
        _figure(str(operation), rows).savefig(picture, dpi=110)
        pictures.append(picture)
    return pictures


def _row(line: dict) -> dict:
    recorded = line["flashmla"] or {}
    return {
        "op": line["op"],
        "case": line["case"],
        "series": f"{line['backend']}, {gpu_slug(line['device']).upper()}",
        CHIP: _largest(line["share_of_matmul"], line["share_of_copy"]),
        FLASHMLA: line["share_of_flashmla"],
        FLASHMLA_CHIP: _largest(
            recorded.get("tflops") and recorded["tflops"] / RECORDED_MATMUL_TFLOPS,
            recorded.get("gbps") and recorded["gbps"] / RECORDED_COPY_GBPS,
        ),
    }


def _figure(operation: str, rows: pd.DataFrame) -> Figure:
    cases = list(dict.fromkeys(rows["case"]))
    compared = bool(rows[FLASHMLA].notna().to_numpy().any())
    height = HEAD_INCHES + ROW_INCHES * len(cases) * max(len(set(rows["series"])) / 2, 1)
    figure = Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
    axes = figure.subplots(1, 2 if compared else 1, sharey=True, squeeze=False)[0]
    figure.suptitle(operation)

    _bars(axes[0], rows, cases, CHIP)
    axes[0].set_xlabel("share of the run's matmul or copy, the larger one")
    markers = rows.drop_duplicates("case").set_index("case")[FLASHMLA_CHIP].reindex(cases).to_numpy(dtype=float)
    if compared:
        axes[0].plot(markers, range(len(cases)), "k|", markersize=11, label="FlashMLA, H100, in its run")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    if compared:
        _bars(axes[1], rows, cases, FLASHMLA)
        axes[1].axvline(1.0, color="black", linewidth=1)
        axes[1].set_xlabel("FlashMLA's recorded time over this one")
    return figure


def _bars(axes: Axes, rows: pd.DataFrame, cases: list[str], column: str) -> None:
    table = rows.pivot_table(index="case", columns="series", values=column, sort=False, observed=True)
    table.reindex(cases).plot.barh(ax=axes, width=0.75, legend=False)
    if not axes.yaxis_inverted():
        axes.invert_yaxis()
    axes.set_ylabel("")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def _largest(*shares: float | None) -> float | None:
    return max((share for share in shares if share is not None), default=None)
