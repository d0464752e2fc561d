"""``concat_mla_q`` in Triton: a program copies bytes of both parts of some heads."""

# Triton's annotations and calls are not Python's.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportInvalidTypeForm=false

from __future__ import annotations

import torch
import triton.language as tl

from flashlatte.kernels.triton.cache_layout import as_bytes
from flashlatte.kernels.triton.row_copy import NUM_WARPS, row_copy, strides_in_units, tile_of_words, words_at
from flashlatte.kernels.triton.rows import HeadRows
from flashlatte.runtime.triton_kernel import kernel

ROWS = 16


def concat_mla_q(ql_nope: torch.Tensor, q_pe: torch.Tensor, out: torch.Tensor) -> None:
    tokens, heads, width = out.shape
    latent, size = ql_nope.shape[2], out.element_size()
    copy = row_copy(width * size, ROWS, ql_nope, q_pe, out, divisible=latent * size)
    concat_mla_q_kernel[copy.grid(tokens * heads)](
        *(HeadRows(as_bytes(x), *strides_in_units(copy, x), copy.unit) for x in (ql_nope, q_pe, out)),
        num_rows=tokens * heads,
        heads=heads,
        LATENT=latent * size // copy.word,
        COPY=copy,
        num_warps=NUM_WARPS,
    )


@kernel
def concat_mla_q_kernel(
    latent: HeadRows,
    rope: HeadRows,
    out: HeadRows,
    num_rows: tl.int64,
    heads: tl.int64,
    LATENT: tl.constexpr,
    COPY: tl.constexpr,
):
    """LATENT: words of the latent part."""
    first_row, word, in_row = tile_of_words(COPY)
    row = first_row + tl.arange(0, COPY.block_rows)
    token, head = row // heads, row % heads
    latents = words_at(latent.start, token * latent.token_stride + head * latent.head_stride, latent.align)
    ropes = words_at(rope.start, token * rope.token_stride + head * rope.head_stride, rope.align)
    rows = words_at(out.start, token * out.token_stride + head * out.head_stride, out.align)
    in_use = (row < num_rows)[:, None]
    # [block_rows, block_words]
    words = tl.load(latents[:, None] + word, mask=in_use & (word < LATENT), other=0)
    words |= tl.load(ropes[:, None] + (word - LATENT), mask=in_use & in_row & (word >= LATENT), other=0)
    tl.store(rows[:, None] + word, words, mask=in_use & in_row)
