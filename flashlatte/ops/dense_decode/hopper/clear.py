"""The kernel before the kernel, where partial results pass from part to part: none is there yet."""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportCallIssue=false

from __future__ import annotations

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashlatte.runtime.triton_kernel import kernel

BLOCK = 256


@kernel
def clear_kernel(scratch, records: tl.int32, RECORD: tl.constexpr, BLOCK: tl.constexpr):
    """Zero the two flags with which each of ``records`` records of RECORD numbers begins."""
    # What comes next finds out where to begin, and waits for the end of this.
    gdc_launch_dependents()
    # The kernel before this one in the stream may still run, in the same scratch.
    gdc_wait()
    record = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    flags = scratch + record.to(tl.int64)[:, None] * RECORD + tl.arange(0, 2)[None, :]
    tl.store(flags, 0.0, mask=(record < records)[:, None])
