"""``push`` in Triton: each row is read once and stored on every rank."""

from __future__ import annotations

import triton.language as tl

from flashlatte.runtime.triton_kernel import kernel

# pyright: reportInvalidTypeForm=false


@kernel
def push_kernel(
    x,
    targets,
    row_units: tl.int64,
    target_row_units: tl.int64,
    TARGETS: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy rows of row_units · ALIGN elements from x to each of targets[TARGETS], whose rows are strided."""
    row_size = row_units * ALIGN
    blocks = tl.cdiv(row_size, BLOCK)
    program = tl.program_id(0).to(tl.int64)
    row, first = program // blocks, program % blocks * BLOCK
    columns = first + tl.arange(0, BLOCK)
    in_row = columns < row_size
    values = tl.load(x + row * row_size + columns, mask=in_row)  # [BLOCK]
    for target in tl.static_range(TARGETS):
        tl.store(targets[target] + row * target_row_units * ALIGN + columns, values, mask=in_row)
