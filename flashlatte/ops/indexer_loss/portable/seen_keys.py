"""Which keys a query sees, by slots: positions in its list of indices, or key numbers if it sees a range.

``ranges`` [2, s_q]: the first slot of each token that counts, and the slot after the last one.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from flashlatte.kernels.triton.online_softmax import within


@triton.jit
def slot_range(ranges, s_q, token):
    """(begin, end) of the slots of a token that count."""
    return tl.load(ranges + token), tl.load(ranges + s_q + token)


@triton.jit
def keys_at(slot, begin, end, indices, offset, width, s_kv):
    """(keys, whether the query sees them) at ``slot``; key 0 where it does not. ``offset``: the query's first index."""
    seen = (slot >= begin) & (slot < end)
    key = slot
    if indices is not None:
        # In bounds for every slot: with a mask Triton would not load a step ahead.
        key = tl.load(indices + offset + tl.minimum(slot, width - 1))
        seen = seen & within(key, s_kv)
    return tl.where(seen, key, 0).to(tl.int64), seen
