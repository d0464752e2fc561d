"""From arguments to launches: all that a call settles on the host, from shapes and strides alone."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashlatte.kernels.hopper.mla_tiles import HALF, KEYS, LATENT, ROPE, ROWS
from flashlatte.ops.dense_decode.hopper import clear
from flashlatte.ops.dense_decode.hopper.clear import clear_kernel
from flashlatte.ops.dense_decode.hopper.kernel import kernel
from flashlatte.ops.dense_decode.hopper.partial import RECORD
from flashlatte.ops.dense_decode.hopper.tiles import PAIR
from flashlatte.runtime import dispatch
from flashlatte.runtime.strides import strides_in_use
from flashlatte.runtime.tma_descriptors import Address, describe
from flashlatte.runtime.triton_kernel import launching_on
from flashlatte.split_kv import combine, output_rows, plan

_LOG2_E = math.log2(math.e)
# With batch_invariant, steps of a split, and the most splits of a request, over all groups of its query rows.
_SPLIT_STEPS = 8
_FIXED_SPLITS = 128
# What a request begun costs a part of a balanced schedule, in steps.
_OVERHEAD = 2
# Numbers in 16 bytes, what the copies need rows to be aligned to.
_ALIGN = 8


@dataclass(frozen=True)
class Plan:
    """What the launches of one shape have in common.

    Attributes:
        num_groups, row_blocks: programs that need all keys of a request; those of each kv head.
        parts: of the balanced schedule, or splits of a request.
        launches: (first request, requests) of each launch.
        scratch: float32 numbers of a launch's partial results; 0 if no request is split.
        overhead, split_steps, max_splits, passes_on: see ``schedule.Plan``.
    """

    num_groups: int
    row_blocks: int
    parts: int
    launches: tuple[tuple[int, int], ...]
    scratch: int
    overhead: int
    split_steps: int | None
    max_splits: int
    passes_on: bool


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
    """``k_scale_*`` belong to caches that this kernel refuses."""
    batch, s_q, h_q, head_dim = q.shape
    num_pages, page_size, h_kv, _ = k_cache.shape
    max_pages = block_table.shape[1]
    device = q.device
    heads = h_q // h_kv
    rows = s_q * heads
    made = make_plan(dispatch.multiprocessors(device), batch, rows, h_kv, max_pages * page_size, batch_invariant)
    keys_half, keys_rope = _descriptors(
        k_cache.data_ptr(), k_cache.dtype, tuple(k_cache.shape), strides_in_use(k_cache), device
    )
    q_strides = strides_in_use(q)
    if q.data_ptr() % 16 or any(stride % _ALIGN for stride in q_strides):
        q = q.clone(memory_format=torch.contiguous_format)
        q_strides = strides_in_use(q)
    q_request, q_token, q_head = q_strides
    out_align = _ALIGN if out.data_ptr() % 16 == 0 and all(s % _ALIGN == 0 for s in strides_in_use(out)) else 1
    query_half, query_rope = _query_descriptors(q, q_strides, heads)
    limit = min(max_pages * page_size, 2**31 - 1 - PAIR.value)
    lists = (batch, 1, cache_seqlens, cache_seqlens.stride(0), 0, limit, None, 0, 0, None)
    outputs = output_rows.output_arguments(out, lse, None, heads, rows, empty_lse, out_align)

    with launching_on(device):
        scratch = torch.empty(made.scratch, dtype=torch.float32, device=device) if made.scratch else None
        if made.passes_on:
            records = made.parts * made.num_groups
            clear_kernel[(-(-records // clear.BLOCK),)](
                scratch, records, RECORD=RECORD.value, BLOCK=clear.BLOCK, num_warps=4, launch_pdl=True
            )
        for first, count in made.launches:
            programs = made.parts * made.num_groups * (1 if made.split_steps is None else count)
            kernel[(programs,)](
                keys_half,
                keys_rope,
                query_half,
                query_rope,
                q,
                q_request // _ALIGN,
                q_token // _ALIGN,
                q_head // _ALIGN,
                block_table,
                block_table.stride(0),
                num_pages,
                batch,
                cache_seqlens,
                cache_seqlens.stride(0),
                limit,
                *outputs[:8],
                heads,
                rows,
                empty_lse,
                scratch,
                s_q - 1 if causal else 0,
                softmax_scale * _LOG2_E,
                made.row_blocks,
                made.num_groups,
                made.parts,
                first,
                BLOCKS_PER_PAGE=page_size // KEYS.value,
                OUT_ALIGN=out_align,
                OVERHEAD=made.overhead,
                SPLIT_STEPS=made.split_steps,
                MAX_SPLITS=made.max_splits,
                PASSES_ON=made.passes_on,
                num_warps=4,
                enable_fp_fusion=True,
                launch_pdl=True,
            )
            if scratch is not None and not made.passes_on:
                combine.launch_combine(
                    scratch,
                    lists,
                    outputs,
                    items=count,
                    num_groups=made.num_groups,
                    row_blocks=made.row_blocks,
                    parts=made.parts,
                    block_n=PAIR.value,
                    block_h=ROWS.value,
                    d_v=LATENT.value,
                    overhead=made.overhead,
                    row_align=out_align,
                    first_item=first,
                    split_blocks=made.split_steps,
                    max_splits=made.max_splits,
                    noted=made.split_steps is None,
                )


@functools.lru_cache(maxsize=4096)
def make_plan(multiprocessors: int, batch: int, rows: int, h_kv: int, max_keys: int, batch_invariant: bool) -> Plan:
    row_blocks = -(-rows // ROWS.value)
    groups = h_kv * row_blocks
    most_steps = -(-max_keys // PAIR.value)
    record = combine.record_bytes(ROWS.value, LATENT.value)
    split_steps: int | None
    overhead = 0
    passes_on = False
    if batch_invariant:
        split_steps, max_splits = _SPLIT_STEPS, max(_FIXED_SPLITS // groups, 1)
        parts = min(max_splits, -(-most_steps // split_steps))
        launches = plan.fixed_groups(batch, groups * parts * record if parts > 1 else 1)
        records = max(count for _, count in launches) * groups * parts if parts > 1 else 0
    else:
        balanced = plan.balanced_parts(batch, groups, multiprocessors, most_steps, record)
        if batch * (most_steps + _OVERHEAD) > plan.MOST_COST:
            balanced = None
        split_steps, max_splits = (1, 1) if balanced is None else (None, 0)
        parts = balanced or 1
        # With few requests a part should be as short as can be; with many it shares few of them.
        passes_on = balanced is not None and 2 * batch >= parts
        overhead = _OVERHEAD if passes_on else 0
        records = 0 if balanced is None else groups * parts * (1 if passes_on else 2)
        launches = ((0, batch),)
    return Plan(
        num_groups=groups,
        row_blocks=row_blocks,
        parts=parts,
        launches=launches,
        # Behind the records of balanced parts, what they note for the merging. batch_invariant always has scratch: a
        # kernel compiled without it might round otherwise.
        scratch=records * RECORD.value
        if passes_on
        else max(records * record // 4 + (parts if records and split_steps is None else 0), int(batch_invariant)),
        overhead=overhead,
        split_steps=split_steps,
        max_splits=max_splits,
        passes_on=passes_on,
    )


def _query_descriptors(q: torch.Tensor, strides: tuple[int, ...], heads: int) -> tuple[Any, Any]:
    """Of 64 rows of q, 256 columns and its rope; (None, None) where 64 rows are no box, or an axis repeats itself."""
    repeats = any(size > 1 and not stride for size, stride in zip(q.shape, strides, strict=False))
    if repeats or (heads % ROWS.value and ROWS.value % heads):
        return None, None
    box = (1, max(ROWS.value // heads, 1), min(heads, ROWS.value))
    return _tiles(Address(q.data_ptr(), q.dtype), tuple(q.shape), strides, box)


@functools.lru_cache(maxsize=1024)
def _descriptors(
    address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], device: torch.device
) -> tuple[TensorDescriptor, TensorDescriptor | None]:
    """TMA descriptors of a cache [pages, page_size, h_kv, d]: of 256 columns of a block of keys, and of its rope."""
    if address % 16 or any(stride % _ALIGN for stride in strides):
        raise ValueError(f"k_cache must have rows that begin at multiples of 16 bytes, got strides {(*strides, 1)}")
    return _tiles(Address(address, dtype), shape, strides, (1, KEYS.value, 1))


def _tiles(
    base: Address, shape: tuple[int, ...], strides: tuple[int, ...], rows: tuple[int, ...]
) -> tuple[TensorDescriptor, TensorDescriptor | None]:
    """Descriptors of ``rows`` by 256 columns, and by the 64 of the rope if there are more than 512."""
    half = describe(base, shape, strides, (*rows, HALF.value))
    return half, describe(base, shape, strides, (*rows, ROPE.value)) if shape[3] > LATENT.value else None
