"""Top-k on a GPU, as columns and as slots: every backend bitwise like the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu import harness
from gpu.harness import DEVICE
from support.topk_rows import KINDS, rows_of

from flashlatte.ops.index_convert import index_convert
from flashlatte.ops.topk import topk

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def integers(low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high, shape, device=DEVICE, dtype=torch.int32)


TOPK_SHAPES = {
    "portable": [(3, 131072, 2048), (150, 20000, 512), (700, 20000, 512), (2, 2**20, 4096), (40, 900, 1)],
    # Clusters of 8 and of 2 CTAs, one of 16 warps, and one of 8; a shorter list.
    "hopper": [(3, 131072, 2048), (50, 40000, 2048), (90, 20001, 2048), (700, 30000, 2048), (300, 900, 1)],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("backend", "rows", "width", "k"),
    [(backend, *shape) for backend, shapes in TOPK_SHAPES.items() for shape in shapes],
)
def test_topk(kind: str, backend: str, rows: int, width: int, k: int) -> None:
    # Rows of hopper's begin between multiples of 16 bytes.
    gap = 3 if backend == "hopper" else 0
    check_topk(rows_of(kind, rows, width + gap, 0, DEVICE)[:, :width], k, backend)


def test_topk_of_bf16_on_hopper() -> None:
    check_topk(normal(700, 30005, dtype=BF16)[:, :30000], 2048, "hopper")


def check_topk(logits: torch.Tensor, k: int, backend: str) -> None:
    rows, width = logits.shape
    start = integers(-2, 9, rows) if backend == "hopper" else None
    end = integers(0, width + 5, rows)
    end[0] = width
    expected = topk(logits, k, start=start, end=end, return_values=True, backend="reference")
    for _ in range(2):
        with harness.refusals_skip(backend):
            indices, values = topk(logits, k, start=start, end=end, return_values=True, backend=backend)
        assert indices.equal(expected[0])
        assert harness.bits(values).equal(harness.bits(expected[1]))
    check_topk_slots(logits, k, backend, start=start, end=end)


def check_topk_slots(logits: torch.Tensor, k: int, backend: str, **options: Any) -> None:
    """With a table that is too short for some rows and has entries that are no pages."""
    rows, width = logits.shape
    positions = chosen(logits, k, **options, backend="reference")
    for page_size, ids in ((64, None), (1, integers(-1, 4, rows))):
        table = integers(-3, 10_000, rows if ids is None else 3, max(width // page_size - 1, 1))
        expected = index_convert(positions, table, page_size, request_ids=ids, backend="reference")
        pages = {"block_table": table, "page_size": page_size, "request_ids": ids}
        assert chosen(logits, k, **options, **pages, backend=backend).equal(expected)


def chosen(logits: torch.Tensor, k: int, **options: Any) -> torch.Tensor:
    indices = topk(logits, k, **options)
    assert isinstance(indices, torch.Tensor)
    return indices


@pytest.mark.parametrize("backend", ["hopper", "portable"])
def test_topk_beyond_2_31_entries(backend: str) -> None:
    rows, width = 2100, 2**20
    logits = torch.zeros(rows, width, device=DEVICE, dtype=BF16)
    columns = integers(0, width, rows)
    logits[torch.arange(rows, device=DEVICE), columns.long()] = 1.0
    with harness.refusals_skip(backend):
        assert chosen(logits, 1, backend=backend)[:, 0].equal(columns)


@pytest.mark.parametrize(("backend", "rows"), [("portable", 64), ("hopper", 64), ("hopper", 600)])
@pytest.mark.parametrize("page_size", [None, 64])
def test_topk_in_a_graph_follows_lengths_logits_and_tables(page_size: int | None, backend: str, rows: int) -> None:
    logits = normal(rows, 40000)
    table = None if page_size is None else integers(0, 10, rows, 625)
    options = {
        "end": torch.full((rows,), 40000, device=DEVICE, dtype=torch.int32),
        "block_table": table,
        "page_size": page_size,
    }
    with harness.refusals_skip(backend):
        replay, indices = harness.captured(lambda: topk(logits, 2048, **options, backend=backend))
    assert isinstance(indices, torch.Tensor)
    for length in (40000, 3, 2048, 2049, 8000, 9000, 0):
        options["end"].fill_(length)
        logits.normal_()
        if table is not None:
            table.random_(0, 10_000)
        replay()
        assert indices.equal(chosen(logits, 2048, **options, backend="reference"))
