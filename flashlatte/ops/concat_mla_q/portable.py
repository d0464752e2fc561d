"""``concat_mla_q`` in Triton: a program copies bytes of both parts of some heads."""

from __future__ import annotations

import math

import torch
import triton.language as tl

from flashlatte.kernels.triton.cache_layout import alignment_bytes, as_bytes, cdiv
from flashlatte.runtime.strides import stride_in_use
from flashlatte.runtime.triton_kernel import kernel

ROWS = 16
BLOCK_BYTES = 256
NUM_WARPS = 4


def concat_mla_q(ql_nope: torch.Tensor, q_pe: torch.Tensor, out: torch.Tensor) -> None:
    tensors = (ql_nope, q_pe, out)
    size = out.element_size()
    tokens, heads, width = out.shape
    strides = [stride_in_use(tensor, axis) * size for tensor in tensors for axis in (0, 1)]
    latent, width = ql_nope.shape[2] * size, width * size
    unit = math.gcd(*map(alignment_bytes, tensors), *strides, latent, width)
    concat_mla_q_kernel[(cdiv(tokens * heads, ROWS) * cdiv(width, BLOCK_BYTES),)](
        ql_nope=as_bytes(ql_nope),
        q_pe=as_bytes(q_pe),
        out=as_bytes(out),
        num_rows=tokens * heads,
        heads=heads,
        latent_token_stride=strides[0] // unit,
        latent_head_stride=strides[1] // unit,
        rope_token_stride=strides[2] // unit,
        rope_head_stride=strides[3] // unit,
        out_token_stride=strides[4] // unit,
        out_head_stride=strides[5] // unit,
        LATENT=latent // unit,
        WIDTH=width // unit,
        ALIGN=unit,
        BLOCK_R=ROWS,
        BLOCK_BYTES=BLOCK_BYTES,
        num_warps=NUM_WARPS,
    )


@kernel
def concat_mla_q_kernel(
    ql_nope,
    q_pe,
    out,
    num_rows: tl.int64,
    heads: tl.int64,
    latent_token_stride: tl.int64,
    latent_head_stride: tl.int64,
    rope_token_stride: tl.int64,
    rope_head_stride: tl.int64,
    out_token_stride: tl.int64,
    out_head_stride: tl.int64,
    LATENT: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
):
    """Copy BLOCK_BYTES of BLOCK_R heads. Widths and strides are in units of ALIGN bytes."""
    WORD_BYTES: tl.constexpr = 4 if ALIGN >= 4 else 1
    WORD: tl.constexpr = tl.uint32 if ALIGN >= 4 else tl.uint8
    WORDS: tl.constexpr = ALIGN // WORD_BYTES
    BLOCK: tl.constexpr = BLOCK_BYTES // WORD_BYTES
    column_blocks: tl.constexpr = (WIDTH * WORDS + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    row = (program // column_blocks).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    token, head = row // heads, row % heads
    word = (program % column_blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
    latents = ql_nope.to(tl.pointer_type(WORD)) + (token * latent_token_stride + head * latent_head_stride) * WORDS
    ropes = q_pe.to(tl.pointer_type(WORD)) + (token * rope_token_stride + head * rope_head_stride) * WORDS
    rows = out.to(tl.pointer_type(WORD)) + (token * out_token_stride + head * out_head_stride) * WORDS
    in_use = (row < num_rows)[:, None]
    is_latent, in_row = word < LATENT * WORDS, word < WIDTH * WORDS
    # [BLOCK_R, BLOCK]
    words = tl.load(latents[:, None] + word, mask=in_use & is_latent, other=0)
    words |= tl.load(ropes[:, None] + (word - LATENT * WORDS), mask=in_use & in_row & (word >= LATENT * WORDS), other=0)
    tl.store(rows[:, None] + word, words, mask=in_use & in_row)
