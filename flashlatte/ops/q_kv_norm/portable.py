"""``q_kv_norm`` in Triton: the first programs process a token's query latent each, the following ones its key."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flashlatte.kernels.triton.cache_layout import alignment_elements
from flashlatte.kernels.triton.fp8 import from_float32, to_float32
from flashlatte.runtime import machine
from flashlatte.runtime.strides import stride_in_use
from flashlatte.runtime.triton_kernel import kernel

# Warps of a program per byte of an element (2 for bf16, 4 for float32), so that a thread holds the same number of
# bytes.
WARPS_PER_BYTE = 1


def q_kv_norm(
    q: torch.Tensor,
    kv: torch.Tensor,
    q_weight: torch.Tensor,
    kv_weight: torch.Tensor,
    eps: float,
    q_out: torch.Tensor,
    kv_out: torch.Tensor,
) -> None:
    strides = stride_in_use(q, 0), stride_in_use(kv, 0)
    # Strides are passed in units of their alignment, at most 16 bytes. The compiler can then vectorise loads without a
    # variant for each stride.
    q_unit = alignment_elements(q, strides[0])
    kv_unit = alignment_elements(kv, strides[1])
    tokens = q.shape[0]
    q_kv_norm_kernel[(2 * tokens,)](
        q=q,
        kv=kv,
        q_weight=q_weight,
        kv_weight=kv_weight,
        q_out=q_out,
        kv_out=kv_out,
        eps=eps,
        num_tokens=tokens,
        q_stride=strides[0] // q_unit,
        kv_stride=strides[1] // kv_unit,
        RANK=q.shape[1],
        D=kv.shape[1],
        BLOCK_RANK=triton.next_power_of_2(q.shape[1]),
        BLOCK_D=triton.next_power_of_2(kv.shape[1]),
        Q_ALIGN=q_unit,
        KV_ALIGN=kv_unit,
        INTERPRETED=machine.interpreting(),
        num_warps=WARPS_PER_BYTE * q.element_size(),
    )


@kernel
def q_kv_norm_kernel(
    q,
    kv,
    q_weight,
    kv_weight,
    q_out,
    kv_out,
    eps: tl.float32,
    num_tokens: tl.int64,
    q_stride: tl.int64,
    kv_stride: tl.int64,
    RANK: tl.constexpr,
    D: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    Q_ALIGN: tl.constexpr,
    KV_ALIGN: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    if program < num_tokens:
        row = q + program * q_stride * Q_ALIGN
        store_norm(row, q_weight, q_out + program * RANK, eps, RANK, BLOCK_RANK, INTERPRETED)
    else:
        token = program - num_tokens
        row = kv + token * kv_stride * KV_ALIGN
        store_norm(row, kv_weight, kv_out + token * D, eps, D, BLOCK_D, INTERPRETED)


@triton.jit
def store_norm(row, weight, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr):
    """Write the RMSNorm of one row of WIDTH elements; BLOCK is the next power of two."""
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    x = to_float32(tl.load(row + column, mask=inside, other=0.0), INTERPRETED)
    gain = to_float32(tl.load(weight + column, mask=inside, other=0.0), INTERPRETED)
    x = x * tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps) * gain
    tl.store(out + column, from_float32(x, out.dtype.element_ty, INTERPRETED), mask=inside)
