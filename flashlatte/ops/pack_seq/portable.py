"""``pack_seq`` and ``unpack_seq`` in Triton: a program copies bytes of some tokens."""

# Triton's annotations and calls are not Python's.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportInvalidTypeForm=false

from __future__ import annotations

import torch
import triton.language as tl

from flashlatte.kernels.triton.cache_address import Requests, request_of_row, requests_of
from flashlatte.kernels.triton.row_copy import NUM_WARPS, row_copy, strides_in_units, tile_of_words, words_at
from flashlatte.kernels.triton.rows import HeadRows, TokenRows
from flashlatte.runtime.triton_kernel import kernel

ROWS = 16


def pack_seq(x: torch.Tensor, cu_seqlens: torch.Tensor, pad: int, out: torch.Tensor) -> None:
    """Copy x [T, width] to out [b, max_seqlen, width], contiguous; ``pad`` is four bytes of padding."""
    requests, max_seqlen, width = out.shape
    copy = row_copy(width * x.element_size(), ROWS, x, out)
    pack_seq_kernel[copy.grid(requests * max_seqlen)](
        TokenRows(x, *strides_in_units(copy, x), copy.unit),
        requests_of(cu_seqlens, requests, None),
        out=out,
        total_tokens=x.shape[0],
        num_rows=requests * max_seqlen,
        max_seqlen=max_seqlen,
        pad=pad & 0xFFFFFFFF,
        COPY=copy,
        num_warps=NUM_WARPS,
    )


def unpack_seq(packed: torch.Tensor, cu_seqlens: torch.Tensor, out: torch.Tensor) -> None:
    """Copy packed [b, max_seqlen, width] to out [T, width]."""
    requests, max_seqlen, width = packed.shape
    copy = row_copy(width * out.element_size(), ROWS, packed, out)
    unpack_seq_kernel[copy.grid(out.shape[0])](
        HeadRows(packed, *strides_in_units(copy, packed), copy.unit),
        requests_of(cu_seqlens, requests, None),
        TokenRows(out, *strides_in_units(copy, out), copy.unit),
        num_rows=out.shape[0],
        max_seqlen=max_seqlen,
        COPY=copy,
        num_warps=NUM_WARPS,
    )


@kernel
def pack_seq_kernel(
    x: TokenRows,
    requests: Requests,
    out,
    total_tokens: tl.int64,
    num_rows: tl.int64,
    max_seqlen: tl.int64,
    pad: tl.int64,
    COPY: tl.constexpr,
):
    first_row, word, in_row = tile_of_words(COPY)
    row = first_row + tl.arange(0, COPY.block_rows)
    in_use = row < num_rows
    request = tl.where(in_use, row // max_seqlen, 0)
    begin = tl.load(requests.cu_seqlens + request * requests.cu_stride, mask=in_use, other=0).to(tl.int64)
    end = tl.load(requests.cu_seqlens + (request + 1) * requests.cu_stride, mask=in_use, other=0).to(tl.int64)
    token = begin + row % max_seqlen
    found = in_use & (token >= 0) & (token < end) & (token < total_tokens)
    source = words_at(x.start, tl.where(found, token, 0) * x.stride, x.align)
    # [block_rows, block_words]
    words = tl.load(source[:, None] + word, mask=found[:, None] & in_row, other=0)
    # A one-byte word takes the byte of ``pad`` at its position.
    padding = (pad >> (8 * (word % (5 - COPY.word))).to(tl.int64)).to(words.dtype)
    target = words_at(out, row * COPY.width, COPY.unit)
    tl.store(target[:, None] + word, tl.where(found[:, None], words, padding), mask=in_use[:, None] & in_row)


@kernel
def unpack_seq_kernel(
    packed: HeadRows,
    requests: Requests,
    out: TokenRows,
    num_rows: tl.int64,
    max_seqlen: tl.int64,
    COPY: tl.constexpr,
):
    first_row, word, in_row = tile_of_words(COPY)
    row = first_row + tl.arange(0, COPY.block_rows)
    request, begin = request_of_row(requests, row)
    position = row - begin
    found = (request >= 0) & (row < num_rows) & (position < max_seqlen)
    offset = tl.where(found, request * packed.token_stride + position * packed.head_stride, 0)
    # [block_rows, block_words]
    source = words_at(packed.start, offset, packed.align)
    words = tl.load(source[:, None] + word, mask=found[:, None] & in_row, other=0)
    target = words_at(out.start, row * out.stride, out.align)
    tl.store(target[:, None] + word, words, mask=found[:, None] & in_row)
