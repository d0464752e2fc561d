"""From arguments to launches: all that a call settles on the host, from shapes and strides alone."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashlatte.kernels.hopper.mla_tiles import HALF, KEYS, LATENT, ROPE, ROWS
from flashlatte.ops.dense_decode.hopper import fixup, schedule
from flashlatte.ops.dense_decode.hopper.combine import launch_combine_ranges
from flashlatte.ops.dense_decode.hopper.few_rows.tiles import ROWS as FEW_ROWS
from flashlatte.ops.dense_decode.hopper.fixup import clear_kernel
from flashlatte.ops.dense_decode.hopper.kernel import kernel
from flashlatte.ops.dense_decode.hopper.one_byte_producer import Keys as OneByteKeys
from flashlatte.ops.dense_decode.hopper.producer import Keys, Query
from flashlatte.ops.dense_decode.hopper.schedule import Table
from flashlatte.ops.dense_decode.hopper.tiles import PAIR
from flashlatte.runtime import machine
from flashlatte.runtime.arguments import by_name
from flashlatte.runtime.strides import row_align, strides_in_use
from flashlatte.runtime.tma_descriptors import Address, describe
from flashlatte.split_kv import plan
from flashlatte.split_kv.combine import launch_combine
from flashlatte.split_kv.device import key_lengths
from flashlatte.split_kv.gluon import MLA_PARTIAL, Equals, equals_of
from flashlatte.split_kv.outputs import outputs_of
from flashlatte.split_kv.plan import SplitPlan
from flashlatte.split_kv.rounded_partials import PARTIAL as ROUNDED_PARTIAL

_LOG2_E = math.log2(math.e)
# With batch_invariant, steps of a split, and the most splits of a request, over all groups of its query rows.
_SPLIT_STEPS = 8
_FIXED_SPLITS = 128
# What beginning a request costs a balanced range, in steps: one and a half to two were measured.
_OVERHEAD = 2
# Partial outputs of no more rows than that are combined by the common kernel, which has more CTAs for them ("b 4, h_q
# 16": 23.6 instead of 24.8 µs in a graph). With more rows ``combine`` wins "b 1, h_q 128, 4,096" by 28% (13.7 instead
# of 17.5 µs; docs/notes/dense-decode.md).
_FEW_TO_COMBINE = 16
# Of fixed splits, where nobody asks whether lengths are equal.
_NOT_ASKED = Equals(1, 0)
# What the copies need rows to be aligned to, in bytes and in two-byte numbers.
_ALIGN_BYTES = 16
_ALIGN = 8


@dataclass(frozen=True)
class LaunchPlan:
    """How requests are split, in blocks of a step.

    Attributes:
        split: its balanced ranges, or fixed splits.
        few_rows: whether the kernel's partitions are those of ``few_rows``.
        equals: balanced ranges where all requests are equally long.
        stream_k, rounded: by whom what is split is finished (``schedule.Plan``).
    """

    split: SplitPlan
    few_rows: bool
    equals: Equals = _NOT_ASKED
    stream_k: bool = False
    rounded: bool = False


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
    max_pages = block_table.shape[1]
    device = q.device
    heads = h_q // h_kv
    rows = s_q * heads
    box = math.gcd(page_size, KEYS.value)
    one_byte = k_cache.dtype.itemsize == 1
    launch_plan = make_plan(
        machine.num_sms(device), batch, rows, h_kv, max_pages * page_size, batch_invariant, one_byte
    )
    few_rows = launch_plan.few_rows
    if row_align(q, _ALIGN) == 1:
        q = q.clone(memory_format=torch.contiguous_format)
    q_strides = strides_in_use(q)
    out_align = row_align(out)
    q_units = (stride // _ALIGN for stride in q_strides)
    # The kernel of few rows takes its queries through registers, whatever boxes they would make.
    q_tiles = (None, None) if few_rows else _query_descriptors(q, q_strides, heads)
    query = Query(*q_tiles, q, *q_units, heads, rows)
    keys = _keys(k_cache, box, few_rows)
    table = Table(block_table, block_table.stride(0), num_pages)
    limit = min(max_pages * page_size, 2**31 - 1 - PAIR.value)
    lengths = key_lengths(batch, 1, cache_seqlens, limit)
    outputs = outputs_of(out, lse, None, tokens=1, heads=heads, rows=rows, empty_lse=empty_lse, row_align=out_align)
    split = launch_plan.split

    scratch = torch.empty(split.scratch, dtype=torch.float32, device=device) if split.scratch else None
    if launch_plan.stream_k:
        partials = split.splits * split.groups
        clear_kernel[(-(-partials // fixup.CLEARED),)](
            scratch, partials, PARTIAL=fixup.PARTIAL.value, CLEARED=fixup.CLEARED, num_warps=4, launch_pdl=True
        )
    for first, count in split.launches:
        kernel[(split.ctas(count),)](
            *by_name(
                kernel,
                query,
                *keys,
                table,
                lengths,
                outputs,
                launch_plan.equals,
                k_scale_tensor=k_scale_tensor,
                k_scale=k_scale_value,
                scratch=scratch,
                causal_offset=s_q - 1 if causal else 0,
                scale=softmax_scale * _LOG2_E,
                groups_per_head=split.groups_per_head,
                num_groups=split.groups,
                num_splits=split.splits,
                first_item=first,
            ),
            PLAN=schedule.Plan(
                one_byte=one_byte,
                few_rows=few_rows,
                has_rope=head_dim > LATENT.value,
                box=box,
                boxes_per_page=page_size // box,
                out_align=out_align,
                overhead=split.overhead,
                split_steps=split.split_blocks,
                max_splits=split.max_splits,
                stream_k=launch_plan.stream_k,
                rounded=launch_plan.rounded,
            ),
            num_warps=4,
            launch_pdl=True,
        )
        if scratch is None:
            continue
        if launch_plan.rounded:
            launch_combine_ranges(split, launch_plan.equals, scratch, outputs, lengths, out_align)
        else:
            launch_combine(split, scratch, outputs, out_align, first, count)


@functools.lru_cache(maxsize=4096)
def make_plan(
    num_sms: int, batch: int, rows: int, h_kv: int, max_keys: int, batch_invariant: bool, one_byte: bool
) -> LaunchPlan:
    few_rows = one_byte and rows <= FEW_ROWS.value
    groups_per_head = -(-rows // ROWS.value)
    groups = h_kv * groups_per_head
    most_steps = -(-max_keys // PAIR.value)
    if batch_invariant:
        max_splits = max(_FIXED_SPLITS // groups, 1)
        split = plan.fixed(MLA_PARTIAL, batch, most_steps, groups, groups_per_head, _SPLIT_STEPS, max_splits)
        return LaunchPlan(split, few_rows)
    ranges = plan.num_ranges(batch, groups, num_sms, most_steps, MLA_PARTIAL)
    most_cost = batch * (most_steps + _OVERHEAD)
    if ranges is None or most_cost > plan.MAX_COST:
        return LaunchPlan(plan.whole(MLA_PARTIAL, batch, groups, groups_per_head), few_rows)
    # With few requests a range should be as short as can be; with many it shares few of them.
    shares_few = 2 * batch >= ranges
    stream_k = shares_few and not few_rows
    of_equals = ranges
    # One group of rows in bf16 waits for memory, and not for its CTAs: four more win nothing where lengths differ, and
    # cost 1% where they do not (docs/notes/floors.md).
    if shares_few and (groups > 1 or one_byte):
        # b128-sq2-h128-k8192-varlen: 33 ranges for each group of rows instead of 32 are 1.034 times as fast.
        ranges = plan.num_ranges(batch, groups, num_sms, most_steps, MLA_PARTIAL, of_equals=False) or ranges
    splits_many = not shares_few and min(ranges, most_steps) > 1
    # Its combine works out ranges in 32 bits (``split_kv.gluon.ranges_of_item``).
    rounded = splits_many and rows > _FEW_TO_COMBINE and most_cost * (ranges + 1) <= plan.MAX_COST
    # Lengths of one request are equal, so that starting on it is free: if it does not count, no CTA need find that out.
    overhead = _OVERHEAD if batch > 1 or shares_few or rounded else 0
    split = plan.balanced(MLA_PARTIAL, batch, most_steps, groups, groups_per_head, ranges, overhead)
    if stream_k:
        split = replace(split, scratch=groups * ranges * fixup.PARTIAL.value, combines=False)
    elif rounded:
        split = replace(split, scratch=2 * groups * ranges * ROUNDED_PARTIAL.value)
    return LaunchPlan(split, few_rows, equals_of(of_equals, batch, overhead), stream_k, rounded)


def _query_descriptors(q: torch.Tensor, strides: tuple[int, ...], heads: int) -> tuple[Any, Any]:
    """Of 64 rows of q, 256 columns and its rope; (None, None) where 64 rows are no box, or an axis repeats itself."""
    repeats = any(size > 1 and not stride for size, stride in zip(q.shape, strides, strict=False))
    if repeats or (heads % ROWS.value and ROWS.value % heads):
        return None, None
    box = (1, max(ROWS.value // heads, 1), min(heads, ROWS.value))
    return _tiles(Address(q.data_ptr(), q.dtype), tuple(q.shape), strides, box)


def _keys(k_cache: torch.Tensor, box: int, few_rows: bool) -> tuple[Keys, OneByteKeys]:
    """The cache as each producer takes it."""
    strides = strides_in_use(k_cache)
    address = k_cache.data_ptr(), k_cache.dtype
    keys = Keys(*_descriptors(*address, tuple(k_cache.shape), strides, box, few_rows, k_cache.device))
    if k_cache.dtype.itemsize > 1 or few_rows:
        return keys, OneByteKeys(None, 0, 0, 0)
    return keys, OneByteKeys(k_cache, *(stride // _ALIGN_BYTES for stride in strides))


@functools.lru_cache(maxsize=1024)
def _descriptors(
    address: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: int,
    few_rows: bool,
    device: torch.device,
) -> tuple[TensorDescriptor, TensorDescriptor | None]:
    """TMA descriptors of a cache [pages, page_size, h_kv, d]: of 256 columns of ``box`` keys, and of their rope.

    Of numbers of one byte, as pairs: of lines of 128 bytes of ``box`` keys; for ``few_rows`` as of other numbers, but
    swizzled by 64 bytes.
    """
    if address % _ALIGN_BYTES or any(stride * dtype.itemsize % _ALIGN_BYTES for stride in strides):
        raise ValueError(f"k_cache must have rows that begin at multiples of 16 bytes, got strides {(*strides, 1)}")
    if dtype.itemsize > 1:
        return _tiles(Address(address, dtype), shape, strides, (1, box, 1))
    pages, page_size, heads, width = shape
    pairs, strides_in_pairs = (pages, page_size, heads, width // 2), [stride // 2 for stride in strides]
    base = Address(address, torch.bfloat16)
    if not few_rows:
        return describe(base, pairs, strides_in_pairs, (1, box, 1, 64)), None
    half = describe(base, pairs, strides_in_pairs, (1, box, 1, HALF.value // 2), swizzle=64)
    if width == LATENT.value:
        return half, None
    return half, describe(base, pairs, strides_in_pairs, (1, box, 1, ROPE.value // 2), swizzle=64)


def _tiles(
    base: Address, shape: tuple[int, ...], strides: tuple[int, ...], rows: tuple[int, ...]
) -> tuple[TensorDescriptor, TensorDescriptor | None]:
    """Descriptors of ``rows`` by 256 columns, and by the 64 of the rope if there are more than 512."""
    half = describe(base, shape, strides, (*rows, HALF.value))
    return half, describe(base, shape, strides, (*rows, ROPE.value)) if shape[3] > LATENT.value else None
