"""From arguments to launches: all that a call settles on the host, from shapes alone."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from flashlatte.kernels.triton.config import Config, choose
from flashlatte.kernels.triton.fp8 import converts_e4m3
from flashlatte.kernels.triton.online_softmax import gpu_class
from flashlatte.ops.dense_decode.portable.config import FP8_TABLE, TABLE
from flashlatte.ops.dense_decode.portable.kernel import dense_decode_kernel
from flashlatte.runtime import dispatch
from flashlatte.runtime.strides import strides_in_use
from flashlatte.runtime.triton_kernel import launching_on
from flashlatte.split_kv import combine, output_rows, plan

# Starting on an item costs a program about as much as so many keys.
_OVERHEAD_KEYS = 64
# With batch_invariant, keys of a split times the groups of a request's query rows, whose splits run side by side, and
# the most splits of a request, over all groups.
_SPLIT_KEYS = 1024
_FIXED_SPLITS = 128


@dataclass(frozen=True)
class Plan:
    """What the launches of one shape have in common.

    Attributes:
        config: tile sizes.
        num_groups, row_blocks: programs that need all keys of a request; those of each kv head.
        parts: of the balanced schedule, or splits of a request.
        split_blocks, max_splits: of fixed splits; None, 0 for balanced parts.
        launches: (first request, requests) of each launch.
        scratch: float32 numbers of a launch's partial results; 0 if no request is split.
        constants: what the kernel is compiled for, but for what depends on strides.
    """

    config: Config
    num_groups: int
    row_blocks: int
    parts: int
    split_blocks: int | None
    max_splits: int
    launches: tuple[tuple[int, int], ...]
    scratch: int
    overhead: int
    constants: dict[str, Any]


def dense_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    k_scale_tensor: torch.Tensor | None,
    k_scale_value: float,
    softmax_scale: float,
    causal: bool,
    empty_lse: float,
    batch_invariant: bool,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    batch, s_q, h_q, head_dim = q.shape
    num_pages, page_size, h_kv, _ = k_cache.shape
    head_dim_v = out.shape[3]
    max_pages = block_table.shape[1]
    device = q.device
    is_fp8 = k_cache.dtype != q.dtype
    made = make_plan(
        gpu_class(device),
        dispatch.multiprocessors(device),
        batch,
        s_q * (h_q // h_kv),
        h_kv,
        head_dim,
        head_dim_v,
        page_size,
        max_pages,
        is_fp8,
        batch_invariant,
    )
    if is_fp8:
        k_cache = k_cache.view(torch.uint8)
    q_strides, k_strides = strides_in_use(q), strides_in_use(k_cache)
    q_align = _row_align(q_strides, 8)
    k_align = _row_align(k_strides, 16 if is_fp8 else 8)
    out_align = _row_align(strides_in_use(out), 8)
    q_request, q_token, q_head = q_strides
    k_page, k_token, k_head = k_strides
    limit = min(max_pages * page_size, 2**31 - 1 - made.config.block_n)
    heads = h_q // h_kv
    lists = (batch, 1, cache_seqlens, cache_seqlens.stride(0), 0, limit, None, 0, 0, None)
    outputs = output_rows.output_arguments(out, lse, None, heads, s_q * heads, empty_lse, out_align)

    with launching_on(device):
        scratch = torch.empty(made.scratch, dtype=torch.float32, device=device) if made.scratch else None
        for first, count in made.launches:
            dense_decode_kernel[((count if made.split_blocks else 1) * made.parts * made.num_groups,)](
                q,
                q_request // q_align,
                q_token // q_align,
                q_head // q_align,
                k_cache,
                k_page // k_align,
                k_token // k_align,
                k_head // k_align,
                num_pages,
                block_table,
                block_table.stride(0),
                cache_seqlens,
                cache_seqlens.stride(0),
                limit,
                k_scale_tensor,
                k_scale_value,
                softmax_scale,
                int(causal),
                *outputs[:8],
                empty_lse,
                scratch,
                batch,
                heads,
                s_q * heads,
                made.num_groups,
                made.row_blocks,
                made.parts,
                first,
                TOKEN_STRIDE=k_token // k_align if k_token == h_kv * head_dim else None,
                Q_ALIGN=q_align,
                K_ALIGN=k_align,
                OUT_ALIGN=out_align,
                NATIVE_FP8=is_fp8 and converts_e4m3(device),
                **made.constants,
            )
            if scratch is not None:
                combine.launch_combine(
                    scratch,
                    lists,
                    outputs,
                    items=count,
                    num_groups=made.num_groups,
                    row_blocks=made.row_blocks,
                    parts=made.parts,
                    block_n=made.config.block_n,
                    block_h=made.config.block_h,
                    d_v=head_dim_v,
                    overhead=made.overhead,
                    row_align=out_align,
                    first_item=first,
                    split_blocks=made.split_blocks,
                    max_splits=made.max_splits,
                )


@functools.lru_cache(maxsize=4096)
def make_plan(
    gpu: str,
    multiprocessors: int,
    batch: int,
    rows: int,
    h_kv: int,
    head_dim: int,
    head_dim_v: int,
    page_size: int,
    max_pages: int,
    is_fp8: bool,
    batch_invariant: bool,
) -> Plan:
    table = FP8_TABLE if is_fp8 else TABLE
    chosen, step = choose(table, gpu, rows, head_dim, head_dim_v, in_place=not is_fp8)
    row_blocks = -(-rows // chosen.block_h)
    groups = h_kv * row_blocks
    most_blocks = -(-max_pages * page_size // chosen.block_n)
    overhead = -(-_OVERHEAD_KEYS // chosen.block_n)
    record = combine.record_bytes(chosen.block_h, head_dim_v)

    parts: int | None
    if batch_invariant:
        split_blocks, max_splits = -(-_SPLIT_KEYS * groups // chosen.block_n), max(_FIXED_SPLITS // groups, 1)
        parts = min(max_splits, -(-most_blocks // split_blocks))
        launches = plan.fixed_groups(batch, groups * parts * record if parts > 1 else 1)
        records = max(count for _, count in launches) * groups * parts if parts > 1 else 0
    else:
        parts = plan.balanced_parts(batch, groups, multiprocessors * chosen.programs, most_blocks, record)
        split_blocks, max_splits = (1, 1) if parts is None else (None, 0)
        records = 0 if parts is None else 2 * groups * parts
        parts = parts or 1
        launches = ((0, batch),)
    return Plan(
        config=chosen,
        num_groups=groups,
        row_blocks=row_blocks,
        parts=parts,
        split_blocks=split_blocks,
        max_splits=max_splits,
        launches=launches,
        # batch_invariant always has scratch: a kernel compiled without it might round otherwise.
        scratch=max(records * record // 4, int(batch_invariant)),
        overhead=overhead,
        constants={
            "STEP": step,
            "PAGE_SIZE": page_size,
            "OVERHEAD": overhead,
            "SPLIT_BLOCKS": split_blocks,
            "MAX_SPLITS": max_splits,
            "num_warps": chosen.num_warps,
            "enable_fp_fusion": True,
        },
    )


def _row_align(strides: tuple[int, ...], units: int) -> int:
    """``units`` if every row starts at a multiple of so many numbers, else 1."""
    return units if all(stride % units == 0 for stride in strides) else 1
