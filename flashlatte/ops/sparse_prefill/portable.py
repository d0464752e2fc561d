"""Sparse prefill in Triton: a program gathers the selected rows for one query token and a block of its heads."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from flashlatte.kv_cache.triton_fp8 import narrow
from flashlatte.triton_attention import LN_2, LOG2_E, gpu_class, load_rows, no_keys, normalize, weigh, within
from flashlatte.triton_kernel import kernel, launching_on

# Row width that the table below is for, and the shortest side of a matrix product in Triton.
_TABLE_WIDTH = 576
_SMALLEST = 16


@dataclass(frozen=True)
class Config:
    """Sizes of a program's tiles.

    Attributes:
        block_h: heads of a program.
        block_n: keys of a step.
        num_warps: Triton's.
        num_stages: of the loop over keys: 1 loads in place; 3 has indices a step ahead of rows and rows a step
            ahead of use, 5 two steps each.
        warpgroups: lay the step out for Hopper's warp groups (``triton_attention.weigh``).
    """

    block_h: int
    block_n: int
    num_warps: int
    num_stages: int
    warpgroups: bool = False


# By class of GPU, the first configuration that holds all heads, or the last. "small" has 99 KiB of shared memory.
TABLE: dict[str, tuple[Config, ...]] = {
    "hopper": (
        Config(16, 64, num_warps=4, num_stages=3),
        Config(32, 64, num_warps=8, num_stages=5),
        Config(64, 64, num_warps=8, num_stages=5, warpgroups=True),
    ),
    "blackwell": (
        Config(16, 64, num_warps=4, num_stages=3),
        Config(32, 64, num_warps=8, num_stages=5),
    ),
    "ampere": (
        Config(16, 32, num_warps=4, num_stages=3),
        Config(32, 32, num_warps=8, num_stages=5),
        Config(64, 32, num_warps=8, num_stages=5),
    ),
    "small": (
        Config(16, 32, num_warps=4, num_stages=5),
        Config(32, 32, num_warps=8, num_stages=3),
    ),
    "other": (
        Config(16, 32, num_warps=4, num_stages=1),
        Config(32, 32, num_warps=4, num_stages=1),
    ),
    "interpreter": (
        Config(16, 16, num_warps=1, num_stages=1),
        Config(32, 32, num_warps=1, num_stages=1),
    ),
}


def choose(gpu: str, heads: int, latent: int, rope: int) -> Config:
    """The configuration for rows padded to ``latent`` + ``rope`` numbers."""
    table = TABLE[gpu]
    config = next((config for config in table if heads <= config.block_h), table[-1])
    if config.warpgroups and (latent, rope) not in ((512, 0), (512, 64)):
        config = replace(config, block_n=config.block_n // 2, num_stages=3, warpgroups=False)
    width = latent + rope
    while width > _TABLE_WIDTH:
        config = replace(
            config,
            block_h=max(config.block_h // 2, _SMALLEST),
            block_n=max(config.block_n // 2, _SMALLEST),
            num_stages=min(config.num_stages, 3),
        )
        width //= 2
    return config


@kernel
def sparse_prefill_kernel(
    q,
    q_stride_token: tl.int64,
    q_stride_head: tl.int64,
    kv,
    kv_stride: tl.int64,
    s_kv: tl.int32,
    indices,
    indices_stride: tl.int64,
    topk: tl.int32,
    topk_length,
    length_stride: tl.int64,
    attn_sink,
    sink_stride: tl.int64,
    softmax_scale: tl.float32,
    empty_lse: tl.float32,
    out,
    out_stride_token: tl.int64,
    out_stride_head: tl.int64,
    max_logits,
    lse,
    h_q: tl.int32,
    D: tl.constexpr,
    D_V: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    WARPGROUPS: tl.constexpr,
    Q_ALIGN: tl.constexpr,
    KV_ALIGN: tl.constexpr,
    OUT_ALIGN: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Strides of q, kv and out are in units of Q_ALIGN, KV_ALIGN and OUT_ALIGN numbers.

    The programs of a token's head blocks have adjacent numbers, so that the L2 cache serves all but the first.
    """
    head_blocks = tl.cdiv(h_q, BLOCK_H)
    token = (tl.program_id(0) // head_blocks).to(tl.int64)
    head = (tl.program_id(0) % head_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    in_heads = head < h_q
    q_offset = (token * q_stride_token + head * q_stride_head) * Q_ALIGN
    q_latent = load_rows(q, q_offset, in_heads, 0, D_V, LATENT, INTERPRETED)  # [BLOCK_H, LATENT]
    q_rope = q_latent
    if ROPE > 0:
        q_rope = load_rows(q, q_offset, in_heads, D_V, D - D_V, ROPE, INTERPRETED)  # [BLOCK_H, ROPE]
    length = topk
    if topk_length is not None:
        given = tl.load(topk_length + token * length_stride).to(tl.int64)
        length = tl.minimum(tl.maximum(given, 0), topk).to(tl.int32)
    scale = softmax_scale * LOG2_E

    peak, total, values = no_keys(BLOCK_H, LATENT, WARPGROUPS)
    for start in tl.range(0, length, BLOCK_N, num_stages=STAGES):
        in_tile = tl.arange(0, BLOCK_N)
        index = tl.load(indices + token * indices_stride + tl.minimum(start + in_tile, length - 1))
        valid = within(index, s_kv) & (in_tile < length - start)
        offset = tl.where(valid, index, 0) * kv_stride * KV_ALIGN
        latent = load_rows(kv, offset, valid, 0, D_V, LATENT, INTERPRETED)  # [BLOCK_N, LATENT]
        rope = latent
        if ROPE > 0:
            rope = load_rows(kv, offset, valid, D_V, D - D_V, ROPE, INTERPRETED)  # [BLOCK_N, ROPE]
        peak, total, values = weigh(
            peak,
            total,
            values,
            q_latent,
            q_rope,
            latent,
            rope,
            valid,
            scale,
            start,
            length,
            ROPE,
            WARPGROUPS,
            VALUES_FIRST=WARPGROUPS,
        )
    values, lse2 = normalize(peak, total, values, scale, WARPGROUPS)

    if attn_sink is not None:
        sink = tl.load(attn_sink + head * sink_stride, mask=in_heads, other=0.0) * LOG2_E
        values *= tl.where(lse2 == float("-inf"), 0.0, 1.0 / (1.0 + tl.exp2(sink - lse2)))[:, None]
    cols = tl.arange(0, LATENT)
    out_offset = (token * out_stride_token + head * out_stride_head) * OUT_ALIGN
    tl.store(
        out + out_offset[:, None] + cols[None, :],
        narrow(values, out.dtype.element_ty, INTERPRETED),
        mask=in_heads[:, None] & (cols < D_V)[None, :],
    )
    row = token * h_q + head
    tl.store(max_logits + row, peak * softmax_scale, mask=in_heads)
    tl.store(lse + row, tl.where(lse2 == float("-inf"), empty_lse, lse2 * LN_2), mask=in_heads)


def sparse_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    topk_length: torch.Tensor | None,
    attn_sink: torch.Tensor | None,
    softmax_scale: float,
    empty_lse: float,
    out: torch.Tensor,
    max_logits: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """``max_logits`` and ``lse`` are contiguous."""
    s_q, h_q, head_dim = q.shape
    config, constants = _compiled_for(gpu_class(q.device), h_q, head_dim, out.shape[2])
    q_align, q_strides = _aligned(q.stride(0), q.stride(1))
    kv_align, kv_strides = _aligned(kv.stride(0))
    out_align, out_strides = _aligned(out.stride(0), out.stride(1))
    with launching_on(q.device):
        sparse_prefill_kernel[(s_q * -(-h_q // config.block_h),)](
            q,
            *q_strides,
            kv,
            *kv_strides,
            kv.shape[0],
            indices,
            indices.stride(0),
            indices.shape[2],
            topk_length,
            0 if topk_length is None else topk_length.stride(0),
            attn_sink,
            0 if attn_sink is None else attn_sink.stride(0),
            softmax_scale,
            empty_lse,
            out,
            *out_strides,
            max_logits,
            lse,
            h_q,
            Q_ALIGN=q_align,
            KV_ALIGN=kv_align,
            OUT_ALIGN=out_align,
            **constants,
        )


@functools.lru_cache(maxsize=256)
def _compiled_for(gpu: str, h_q: int, head_dim: int, d_v: int) -> tuple[Config, dict[str, Any]]:
    """The configuration of a shape, and what the kernel is compiled for beside the alignment of rows."""
    latent = _padded(d_v)
    rope = _padded(head_dim - d_v) if head_dim > d_v else 0
    config = choose(gpu, h_q, latent, rope)
    return config, {
        "D": head_dim,
        "D_V": d_v,
        "LATENT": latent,
        "ROPE": rope,
        "BLOCK_H": config.block_h,
        "BLOCK_N": config.block_n,
        "STAGES": config.num_stages,
        "WARPGROUPS": config.warpgroups,
        "INTERPRETED": gpu == "interpreter",
        "num_warps": config.num_warps,
        "enable_fp_fusion": True,
    }


def _padded(width: int) -> int:
    """The width of a tile that holds ``width`` columns."""
    return max(triton.next_power_of_2(width), _SMALLEST)


def _aligned(*strides: int) -> tuple[int, tuple[int, ...]]:
    """The unit, of 16 bytes if all are multiples of it, in which to give the strides of 2-byte numbers, and these."""
    for stride in strides:
        if stride % 8:
            return 1, strides
    return 8, tuple([stride // 8 for stride in strides])
