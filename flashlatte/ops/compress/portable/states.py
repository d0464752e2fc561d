"""States of unfinished groups, paged: where a position's lies."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def locate_state(states, request, position, wanted, STATE_UNIT: tl.constexpr):
    """Where in the cache the states of these positions begin, and which of those that are wanted are there."""
    wanted = wanted & (position < 2**31)
    # Divisions of 64 bits took longer than the row's bytes.
    short, page_size = tl.where(wanted, position, 0).to(tl.uint32), states.page_size.to(tl.uint32)
    column = short // page_size
    offset = (short - column * page_size).to(tl.int64)
    entry = states.table + request * states.table_stride + (column % states.columns.to(tl.uint32)).to(tl.int64)
    page = tl.load(entry, mask=wanted, other=-1).to(tl.int64)
    found = wanted & (page >= 0) & (page < states.num_pages)
    # A selection by ``found`` here is one that Triton 3.6 fails to lay out.
    page = tl.minimum(tl.maximum(page, 0), states.num_pages - 1)
    return (page * states.page_stride + offset * states.token_stride) * STATE_UNIT, found
