"""Kernel arguments of operations on packed requests and paged caches."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashlatte.runtime.kernel_records import ElementPointer, Int32, Int64, Pointer


class PackedRows(NamedTuple):
    """Rows [tokens, heads, d]; ``base`` may be None. The kernel defines the unit of the strides."""

    base: Pointer
    stride_token: Int64
    stride_head: Int64


class Window(NamedTuple):
    """Number of keys before and after its own position that are visible to a query."""

    left: Int32
    right: Int32


class BlockTable(NamedTuple):
    """The pages of requests: ``pages`` at [request · stride], with page ids below ``num_pages``."""

    pages: ElementPointer
    stride: Int64
    num_pages: Int32


def packed_rows(rows: torch.Tensor | None, unit: int = 1) -> PackedRows:
    """Make ``PackedRows`` with strides in units of ``unit`` elements."""
    return PackedRows(None, 0, 0) if rows is None else PackedRows(rows, *(s // unit for s in rows.stride()[:2]))
