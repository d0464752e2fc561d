"""Addresses of the paged states of unfinished groups."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def locate_state(states, request, position, wanted, STATE_UNIT: tl.constexpr):
    """The addresses of the states of positions, and whether each wanted state exists."""
    wanted = wanted & (position < 2**31)
    # 64-bit divisions took longer than loading the row.
    short, page_size = tl.where(wanted, position, 0).to(tl.uint32), states.page_size.to(tl.uint32)
    column = short // page_size
    offset = (short - column * page_size).to(tl.int64)
    entry = states.table + request * states.table_stride + (column % states.columns.to(tl.uint32)).to(tl.int64)
    page = tl.load(entry, mask=wanted, other=-1).to(tl.int64)
    found = wanted & (page >= 0) & (page < states.num_pages)
    # tl.where(found, ...) fails to compile here with Triton 3.6 (layout).
    page = tl.minimum(tl.maximum(page, 0), states.num_pages - 1)
    return (page * states.page_stride + offset * states.token_stride) * STATE_UNIT, found
