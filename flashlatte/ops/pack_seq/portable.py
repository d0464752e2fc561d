"""``pack_seq`` and ``unpack_seq`` in Triton: a program copies bytes of some tokens."""

from __future__ import annotations

import math

import torch
import triton.language as tl

from flashlatte.kernels.triton.cache_address import Requests, request_of_row
from flashlatte.kernels.triton.cache_layout import alignment_bytes, cdiv
from flashlatte.runtime.strides import stride_in_use
from flashlatte.runtime.triton_kernel import kernel

ROWS = 16
BLOCK_BYTES = 256
NUM_WARPS = 4


def pack_seq(x: torch.Tensor, cu_seqlens: torch.Tensor, pad: int, out: torch.Tensor) -> None:
    """Copy x [T, width] to out [b, max_seqlen, width], contiguous; ``pad`` is four bytes of padding."""
    requests, max_seqlen, width = out.shape
    size = x.element_size()
    x_stride, width = stride_in_use(x, 0) * size, width * size
    unit = math.gcd(alignment_bytes(x), alignment_bytes(out), x_stride, width)
    num_rows = requests * max_seqlen
    pack_seq_kernel[(cdiv(num_rows, ROWS) * cdiv(width, BLOCK_BYTES),)](
        x=x,
        cu_seqlens=cu_seqlens,
        out=out,
        cu_stride=cu_seqlens.stride(0),
        total_tokens=x.shape[0],
        num_rows=num_rows,
        max_seqlen=max_seqlen,
        x_stride=x_stride // unit,
        pad=pad & 0xFFFFFFFF,
        WIDTH=width // unit,
        ALIGN=unit,
        BLOCK_R=ROWS,
        BLOCK_BYTES=BLOCK_BYTES,
        num_warps=NUM_WARPS,
    )


def unpack_seq(packed: torch.Tensor, cu_seqlens: torch.Tensor, out: torch.Tensor) -> None:
    """Copy packed [b, max_seqlen, width] to out [T, width]."""
    requests, max_seqlen, width = packed.shape
    size = out.element_size()
    strides = [stride_in_use(packed, axis) * size for axis in (0, 1)] + [stride_in_use(out, 0) * size]
    width *= size
    unit = math.gcd(alignment_bytes(packed), alignment_bytes(out), *strides, width)
    num_rows = out.shape[0]
    unpack_seq_kernel[(cdiv(num_rows, ROWS) * cdiv(width, BLOCK_BYTES),)](
        packed=packed,
        cu_seqlens=cu_seqlens,
        out=out,
        cu_stride=cu_seqlens.stride(0),
        num_requests=requests,
        num_rows=num_rows,
        max_seqlen=max_seqlen,
        request_stride=strides[0] // unit,
        token_stride=strides[1] // unit,
        out_stride=strides[2] // unit,
        WIDTH=width // unit,
        ALIGN=unit,
        BLOCK_R=ROWS,
        BLOCK_BYTES=BLOCK_BYTES,
        num_warps=NUM_WARPS,
    )


@kernel
def pack_seq_kernel(
    x,
    cu_seqlens,
    out,
    cu_stride: tl.int64,
    total_tokens: tl.int64,
    num_rows: tl.int64,
    max_seqlen: tl.int64,
    x_stride: tl.int64,
    pad: tl.int64,
    WIDTH: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
):
    """Write BLOCK_BYTES of BLOCK_R rows of ``out``. WIDTH and strides are in units of ALIGN bytes."""
    WORD_BYTES: tl.constexpr = 4 if ALIGN >= 4 else 1
    WORD: tl.constexpr = tl.uint32 if ALIGN >= 4 else tl.uint8
    WORDS: tl.constexpr = ALIGN // WORD_BYTES
    BLOCK: tl.constexpr = BLOCK_BYTES // WORD_BYTES
    column_blocks: tl.constexpr = (WIDTH * WORDS + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    row = (program // column_blocks).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    word = (program % column_blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
    in_use = row < num_rows
    request = tl.where(in_use, row // max_seqlen, 0)
    begin = tl.load(cu_seqlens + request * cu_stride, mask=in_use, other=0).to(tl.int64)
    end = tl.load(cu_seqlens + (request + 1) * cu_stride, mask=in_use, other=0).to(tl.int64)
    token = begin + row % max_seqlen
    found = in_use & (token >= 0) & (token < end) & (token < total_tokens)
    in_row = word < WIDTH * WORDS
    source = x.to(tl.pointer_type(WORD)) + tl.where(found, token, 0) * x_stride * WORDS
    # [BLOCK_R, BLOCK]
    words = tl.load(source[:, None] + word, mask=found[:, None] & in_row, other=0)
    # If words have one byte, each takes its byte of the four.
    padding = (pad >> (8 * (word % (5 - WORD_BYTES))).to(tl.int64)).to(WORD)
    target = out.to(tl.pointer_type(WORD)) + row * (WIDTH * WORDS)
    tl.store(target[:, None] + word, tl.where(found[:, None], words, padding), mask=in_use[:, None] & in_row)


@kernel
def unpack_seq_kernel(
    packed,
    cu_seqlens,
    out,
    cu_stride: tl.int64,
    num_requests: tl.int64,
    num_rows: tl.int64,
    max_seqlen: tl.int64,
    request_stride: tl.int64,
    token_stride: tl.int64,
    out_stride: tl.int64,
    WIDTH: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
):
    """Write BLOCK_BYTES of BLOCK_R rows of ``out``. WIDTH and strides are in units of ALIGN bytes."""
    WORD_BYTES: tl.constexpr = 4 if ALIGN >= 4 else 1
    WORD: tl.constexpr = tl.uint32 if ALIGN >= 4 else tl.uint8
    WORDS: tl.constexpr = ALIGN // WORD_BYTES
    BLOCK: tl.constexpr = BLOCK_BYTES // WORD_BYTES
    column_blocks: tl.constexpr = (WIDTH * WORDS + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    row = (program // column_blocks).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    word = (program % column_blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
    spans = Requests(cu_seqlens, cu_stride, num_requests + 1, num_requests)
    request, begin = request_of_row(spans, row)
    position = row - begin
    found = (request >= 0) & (row < num_rows) & (position < max_seqlen)
    in_row = word < WIDTH * WORDS
    offset = tl.where(found, request * request_stride + position * token_stride, 0) * WORDS
    # [BLOCK_R, BLOCK]
    words = tl.load((packed.to(tl.pointer_type(WORD)) + offset)[:, None] + word, mask=found[:, None] & in_row, other=0)
    target = out.to(tl.pointer_type(WORD)) + row * out_stride * WORDS
    tl.store(target[:, None] + word, words, mask=found[:, None] & in_row)
