"""The launcher: everything a call computes on the host, from shapes and strides alone."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashlatte.kernels.hopper.mla_tiles import HALF, KEYS, LATENT, ROPE, ROWS
from flashlatte.kernels.triton.cache_row import CacheScale
from flashlatte.kernels.triton.rows import BlockTable
from flashlatte.ops.dense_decode.hopper import fixup, schedule
from flashlatte.ops.dense_decode.hopper.few_rows.tiles import ROWS as FEW_ROWS
from flashlatte.ops.dense_decode.hopper.fixup import clear_kernel
from flashlatte.ops.dense_decode.hopper.kernel import dense_decode_kernel
from flashlatte.ops.dense_decode.hopper.one_byte_producer import OneByteKeys
from flashlatte.ops.dense_decode.hopper.producer import DenseDecodeQuery, KeyDescriptors, QueryRope
from flashlatte.ops.dense_decode.hopper.tiles import STEP_KEYS
from flashlatte.ops.dense_decode.reference import DenseDecodeParams
from flashlatte.runtime import machine
from flashlatte.runtime.strides import row_align, strides_in_use
from flashlatte.runtime.tma_descriptors import Address, check_rows, describe
from flashlatte.split_kv import plan
from flashlatte.split_kv.combine import launch_combine
from flashlatte.split_kv.device import key_lengths
from flashlatte.split_kv.fp24_combine import launch_combine_fp24
from flashlatte.split_kv.fp24_partials import PARTIAL as FP24_PARTIAL
from flashlatte.split_kv.gluon_device import MLA_PARTIAL
from flashlatte.split_kv.outputs import outputs_of
from flashlatte.split_kv.plan import SplitPlan
from flashlatte.split_kv.ranges import UniformRanges, uniform_ranges_of

_LOG2_E = math.log2(math.e)
# With batch_invariant: steps per split, and the maximum number of splits of a request over all its row groups.
_SPLIT_STEPS = 8
_FIXED_SPLITS = 128
# Cost of starting a request in a balanced range, in steps; measured: 1.5 to 2.
_OVERHEAD = 2
# Partial outputs with at most this many rows are combined by ``split_kv.combine``, which launches more CTAs for them
# ("b 4, h_q 16": 23.6 instead of 24.8 µs in a graph). With more rows ``fp24_combine`` is faster ("b 1, h_q 128, 4,096":
# 13.7 instead of 17.5 µs; docs/notes/dense-decode.md).
_FEW_TO_COMBINE = 16
# For fixed splits, which do not use it.
_NOT_UNIFORM = UniformRanges(1, 0)
# Alignment of rows that the copies require, in bytes and in two-byte elements.
_ALIGN_BYTES = 16
_ALIGN = 8


@dataclass(frozen=True)
class DenseDecodeLaunchPlan:
    """The split of the requests; blocks are steps.

    Attributes:
        split: balanced ranges or fixed splits.
        few_rows: whether the kernel runs the partitions of ``few_rows``.
        uniform: balanced ranges for requests of equal length.
        stream_k, fp24_partials: how split requests are combined (``schedule.DenseDecodeConfig``).
    """

    split: SplitPlan
    few_rows: bool
    uniform: UniformRanges = _NOT_UNIFORM
    stream_k: bool = False
    fp24_partials: bool = False


def dense_decode(params: DenseDecodeParams) -> None:
    k_cache, block_table, out = params.k_cache, params.block_table, params.out
    q, q_rope = _query_parts(params)
    batch, s_q, h_q, _ = q.shape
    num_pages, page_size, h_kv, head_dim = k_cache.shape
    max_pages = block_table.shape[1]
    device = q.device
    heads = h_q // h_kv
    rows = s_q * heads
    box = math.gcd(page_size, KEYS.value)
    one_byte = k_cache.dtype.itemsize == 1
    fp8 = params.precision == "fp8"
    launch_plan = make_plan(
        machine.num_sms(device), batch, rows, h_kv, max_pages * page_size, params.batch_invariant, one_byte, fp8
    )
    few_rows = launch_plan.few_rows
    out_align = row_align(out)
    # The kernels for few rows and in e4m3 load their queries through registers.
    half, rope = (None, None) if few_rows or fp8 else _query_descriptors(q, q_rope, heads)
    separate = QueryRope(None, 0, 0, 0) if q_rope is None else QueryRope(q_rope, *_aligned_strides(q_rope))
    query = DenseDecodeQuery(half, rope, q, *_aligned_strides(q), heads, rows, separate)
    descriptors, one_byte_keys = _keys(k_cache, box, few_rows, fp8)
    table = BlockTable(block_table, block_table.stride(0), num_pages)
    limit = min(max_pages * page_size, 2**31 - 1 - STEP_KEYS.value)
    lengths = key_lengths(batch, None, params.cache_seqlens, limit)
    outputs = outputs_of(out, params.lse, None, params.empty_lse, out_align, h_kv=h_kv)
    split = launch_plan.split

    scratch = torch.empty(split.scratch, dtype=torch.float32, device=device) if split.scratch else None
    if launch_plan.stream_k:
        partials = split.splits * split.groups
        clear_kernel[(-(-partials // fixup.CLEARED_PARTIALS),)](
            scratch,
            partials,
            PARTIAL=fixup.PARTIAL.value,
            CLEARED_PARTIALS=fixup.CLEARED_PARTIALS,
            num_warps=4,
            launch_pdl=True,
        )
    for first, count in split.launches:
        dense_decode_kernel[(split.ctas(count),)](
            descriptors,
            query,
            table,
            lengths,
            outputs,
            split.grid(first),
            launch_plan.uniform,
            one_byte_keys,
            CacheScale(params.k_scale_tensor, params.k_scale_value),
            scratch=scratch,
            causal_offset=s_q - 1 if params.causal else 0,
            scale=params.softmax_scale * _LOG2_E,
            CONFIG=schedule.DenseDecodeConfig(
                one_byte=one_byte,
                few_rows=few_rows,
                fp8=fp8,
                has_rope=head_dim > LATENT.value,
                box=box,
                boxes_per_page=page_size // box,
                out_align=out_align,
                overhead=split.overhead,
                split_steps=split.split_blocks,
                max_splits=split.max_splits,
                stream_k=launch_plan.stream_k,
                fp24_partials=launch_plan.fp24_partials,
                # Two row groups: 0.96 to 1.00 of the time; a single one takes 1.09 times as long with it.
                prefetch=not one_byte and split.groups_per_head > 1,
            ),
            num_warps=4,
            launch_pdl=True,
        )
        if scratch is None:
            continue
        if launch_plan.fp24_partials:
            launch_combine_fp24(
                split, scratch, outputs, lengths, out_align, STEP_KEYS.value, uniform=launch_plan.uniform
            )
        else:
            launch_combine(split, scratch, outputs, out_align, first, count)


@functools.lru_cache(maxsize=4096)
def make_plan(
    num_sms: int,
    batch: int,
    rows: int,
    h_kv: int,
    max_keys: int,
    batch_invariant: bool,
    one_byte: bool,
    fp8: bool = False,
) -> DenseDecodeLaunchPlan:
    few_rows = one_byte and not fp8 and rows <= FEW_ROWS.value
    # Transposed outputs are combined by ``split_kv.combine``.
    transposed = few_rows or fp8
    groups_per_head = -(-rows // ROWS.value)
    groups = h_kv * groups_per_head
    max_steps = -(-max_keys // STEP_KEYS.value)
    if batch_invariant:
        max_splits = max(_FIXED_SPLITS // groups, 1)
        split = plan.fixed(MLA_PARTIAL, batch, max_steps, groups, groups_per_head, _SPLIT_STEPS, max_splits)
        return DenseDecodeLaunchPlan(split, few_rows)
    ranges = plan.num_ranges(batch, groups, num_sms, max_steps, MLA_PARTIAL)
    if ranges is None:
        return DenseDecodeLaunchPlan(plan.whole(MLA_PARTIAL, batch, groups, groups_per_head), few_rows)
    # With few requests, ranges should be as short as possible; with many, most requests are not split.
    few_shared = 2 * batch >= ranges
    stream_k = few_shared and not transposed
    keep_items_whole = ranges
    # A single row group in bf16 is bound by memory: four more CTAs gain nothing if lengths differ, and cost 1%
    # otherwise (docs/notes/floors.md).
    if few_shared and (groups > 1 or one_byte):
        # b128-sq2-h128-k8192-varlen: 33 ranges for each group of rows instead of 32 are 1.034 times as fast.
        ranges = plan.num_ranges(batch, groups, num_sms, max_steps, MLA_PARTIAL, keep_items_whole=False) or ranges
    many_splits = not few_shared and min(ranges, max_steps) > 1
    # Its combine kernel multiplies the total cost by the number of ranges in 32 bits (``ranges.ranges_with_item``).
    fits = batch * (max_steps + _OVERHEAD) * (ranges + 1) < 2**31
    fp24_partials = many_splits and rows > _FEW_TO_COMBINE and fits and not fp8
    # A single request always has uniform length, so its overhead is free; with overhead 0, CTAs need not check that.
    overhead = _OVERHEAD if batch > 1 or few_shared or fp24_partials else 0
    split = plan.balanced(MLA_PARTIAL, batch, max_steps, groups, groups_per_head, ranges, overhead)
    if stream_k:
        split = replace(split, scratch=groups * ranges * fixup.PARTIAL.value, combines=False)
    elif fp24_partials:
        split = replace(split, scratch=2 * groups * ranges * FP24_PARTIAL.value)
    return DenseDecodeLaunchPlan(
        split, few_rows, uniform_ranges_of(keep_items_whole, batch, overhead), stream_k, fp24_partials
    )


def _query_parts(params: DenseDecodeParams) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Queries, and their rope if it is another tensor, whose rows the kernel can copy. They are joined otherwise."""
    q, q_rope = params.q, params.q_rope
    if q_rope is not None:
        widths = q.shape[3], q_rope.shape[3]
        if widths == (LATENT.value, ROPE.value) and row_align(q, _ALIGN) == row_align(q_rope, _ALIGN) == _ALIGN:
            return q, q_rope
        q = params.whole_q
    return (q if row_align(q, _ALIGN) == _ALIGN else q.clone(memory_format=torch.contiguous_format)), None


def _aligned_strides(q: torch.Tensor) -> tuple[int, int, int]:
    request, token, head = strides_in_use(q)
    return request // _ALIGN, token // _ALIGN, head // _ALIGN


def _query_descriptors(q: torch.Tensor, q_rope: torch.Tensor | None, heads: int) -> tuple[Any, Any]:
    """TMA descriptors of 64 rows of queries: of 256 columns, and of the rope. (None, None) if 64 rows are not a box, or
    an axis has stride 0."""
    box = (1, max(ROWS.value // heads, 1), min(heads, ROWS.value))
    if (heads % ROWS.value and ROWS.value % heads) or _repeats(q) or (q_rope is not None and _repeats(q_rope)):
        return None, None
    half, rope = _tiles(Address(q.data_ptr(), q.dtype), tuple(q.shape), strides_in_use(q), box)
    if q_rope is not None:
        address = Address(q_rope.data_ptr(), q_rope.dtype)
        rope = describe(address, tuple(q_rope.shape), strides_in_use(q_rope), (*box, ROPE.value))
    return half, rope


def _repeats(q: torch.Tensor) -> bool:
    """Whether an axis repeats its elements: TMA requires strides above 0."""
    return any(size > 1 and not stride for size, stride in zip(q.shape, q.stride(), strict=True))


def _keys(k_cache: torch.Tensor, box: int, few_rows: bool, fp8: bool) -> tuple[KeyDescriptors, OneByteKeys]:
    """The cache in the form that each producer uses."""
    strides = strides_in_use(k_cache)
    shape = tuple(k_cache.shape)
    keys = KeyDescriptors(*_descriptors(k_cache.data_ptr(), k_cache.dtype, shape, strides, box, few_rows, fp8))
    if k_cache.dtype.itemsize > 1 or few_rows or fp8:
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
    fp8: bool,
) -> tuple[TensorDescriptor, TensorDescriptor | None]:
    """TMA descriptors of a cache [pages, page_size, h_kv, d] for boxes of ``box`` keys: of 256 columns, and of the
    rope.

    One-byte elements are described as pairs: boxes of 128 bytes of ``box`` keys. For ``few_rows``, boxes are as above
    with a 64-byte swizzle. For ``fp8``, they have all 512 columns of the latent, and the rope has a 64-byte swizzle.
    """
    check_rows("k_cache", address, strides, dtype.itemsize)
    if dtype.itemsize > 1:
        return _tiles(Address(address, dtype), shape, strides, (1, box, 1))
    pages, page_size, heads, width = shape
    pairs, strides_in_pairs = (pages, page_size, heads, width // 2), [stride // 2 for stride in strides]
    base = Address(address, torch.bfloat16)
    if not (few_rows or fp8):
        return describe(base, pairs, strides_in_pairs, (1, box, 1, 64)), None
    if fp8:
        half = describe(base, pairs, strides_in_pairs, (1, box, 1, LATENT.value // 2))
    else:
        half = describe(base, pairs, strides_in_pairs, (1, box, 1, HALF.value // 2), swizzle=64)
    if width == LATENT.value:
        return half, None
    return half, describe(base, pairs, strides_in_pairs, (1, box, 1, ROPE.value // 2), swizzle=64)


def _tiles(
    base: Address, shape: tuple[int, ...], strides: tuple[int, ...], rows: tuple[int, ...]
) -> tuple[TensorDescriptor, TensorDescriptor | None]:
    """Descriptors of boxes of ``rows`` and 256 columns, and of 64 columns of rope if rows have more than 512
    columns."""
    half = describe(base, shape, strides, (*rows, HALF.value))
    return half, describe(base, shape, strides, (*rows, ROPE.value)) if shape[3] > LATENT.value else None
