"""The k-th largest of the entries that a program holds in registers."""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from flashlatte.ops.topk.order import HIGHEST, OUTSIDE


@triton.jit
def threshold(keys, k):
    """A key that exactly k of ``keys`` reach, if one exists, else the k-th largest key. At least k keys are not
    OUTSIDE."""
    # As unsigned offsets from the lowest int32, so that bits can be determined from the top.
    low = tl.min(tl.where(keys == OUTSIDE, HIGHEST, keys), axis=0).to(tl.int64) + 0x80000000
    high = tl.max(keys, axis=0).to(tl.int64) + 0x80000000
    different = low ^ high
    bit = tl.zeros([], tl.int32) + 31
    while (bit >= 0) & ((different >> tl.maximum(bit, 0)) == 0):
        bit -= 1
    # Bits above are the same in all keys.
    settled = (low >> (bit + 1)) << (bit + 1)
    reached = k + 1
    while (bit >= 0) & (reached != k):
        candidate = settled | (tl.full([], 1, tl.int64) << bit)
        count = tl.sum((keys >= (candidate - 0x80000000).to(tl.int32)).to(tl.int32), axis=0)
        settled = tl.where(count >= k, candidate, settled)
        reached = tl.where(count >= k, count, reached)
        bit -= 1
    return (settled - 0x80000000).to(tl.int32)
