"""The launcher: everything a call computes on the host, from shapes and strides alone."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import torch

from flashlatte.kernels.hopper.mla_tiles import KEYS, LATENT, ROPE, ROWS
from flashlatte.kv_cache.formats import CacheFormat, Tiling
from flashlatte.ops.sparse_decode.hopper import schedule
from flashlatte.ops.sparse_decode.hopper.consumers import SparseDecodeQuery, SparseDecodeQueryRows
from flashlatte.ops.sparse_decode.hopper.kernel import cluster_kernel, kernel
from flashlatte.ops.sparse_decode.hopper.rows import CacheSelection
from flashlatte.ops.sparse_decode.hopper.tiles import MODEL1, PLAIN, V32, V41, V41_FP4, producer_warps
from flashlatte.ops.sparse_decode.reference import SparseDecodeParams
from flashlatte.runtime import machine, query_parts
from flashlatte.runtime.strides import row_align, stride_in_use, strides_in_use
from flashlatte.runtime.triton_internals import clusters_fill
from flashlatte.split_kv import combine, plan
from flashlatte.split_kv.device import key_lengths
from flashlatte.split_kv.fp24_combine import launch_combine_fp24
from flashlatte.split_kv.fp24_partials import PARTIAL as FP24_PARTIAL
from flashlatte.split_kv.gluon_device import MLA_PARTIAL
from flashlatte.split_kv.outputs import outputs_of
from flashlatte.split_kv.plan import SplitPlan

_LOG2_E = math.log2(math.e)
# Cost of starting a query token, in blocks, if there are many query tokens.
_OVERHEAD = 2
# Maximum rows of partial outputs for splits of one block; with more rows, longer splits are faster.
_MAX_BLOCK_ROWS = 3000
# Alignment of rows of q that the copies require: 16 bytes, in two-byte elements.
_ALIGN = 8
_NO_ROWS = SparseDecodeQueryRows(None, None, None, None)


@dataclass(frozen=True)
class SparseDecodeLaunchPlan:
    """The launch plan of calls of one shape.

    Attributes:
        split: the split of query tokens over CTAs.
        ctas: CTAs of the launch. CTAs that process whole query tokens loop over several of them.
        equal_splits: splits per query token, if all have the same number (``split_kv.fp24_combine``); else None.
        granularity: blocks that a CTA processes at a time: two, or one if each split is one block (``one_block``).
    """

    split: SplitPlan
    ctas: int
    equal_splits: int | None = None
    granularity: int = 2

    @property
    def balanced(self) -> bool:
        return self.split.split_blocks is None


def sparse_decode(params: SparseDecodeParams) -> None:
    q, indices, out = params.q, params.indices, params.out
    extra_k_cache, extra_indices = params.extra_k_cache, params.extra_indices
    batch, s_q, h_q, _ = q.shape
    device = q.device
    topk = indices.shape[2]
    extra_topk = None if extra_indices is None else extra_indices.shape[2]
    layout = params.layout
    kind = _kind(layout)
    has_scales = kind != PLAIN.value
    launch_plan = make_plan(
        machine.num_sms(device),
        batch * s_q,
        h_q,
        topk,
        extra_topk or 0,
        params.is_uniform,
        has_scales,
        params.batch_invariant,
    )
    if extra_indices is not None and extra_indices.dtype != indices.dtype:
        # The kernel loads indices of both lists by the same code.
        indices, extra_indices = indices.long(), extra_indices.long()
    own, alignment, flat = _selection(params.k_cache, indices, "k_cache", layout)
    extra = own._replace(k_cache=None, indices=None)
    if extra_k_cache is not None and extra_indices is not None:
        extra, extra_alignment, extra_flat = _selection(extra_k_cache, extra_indices, "extra_k_cache", layout)
        alignment, flat = min(alignment, extra_alignment), flat and extra_flat
    query = _query(q, params.q_rope)
    out_align = row_align(out)
    lengths = key_lengths(batch, s_q, params.topk_length, topk, params.extra_topk_length, extra_topk)
    outputs = outputs_of(out, params.lse, params.attn_sink, params.empty_lse, out_align)
    split = launch_plan.split

    # Two CTAs that need the same tokens each dequantize half of them.
    in_cluster = has_scales and launch_plan.granularity == 2 and split.groups % 2 == 0 and clusters_fill(device, 2)
    launched = cluster_kernel[(launch_plan.ctas // 2,)] if in_cluster else kernel[(launch_plan.ctas,)]
    scratch = torch.empty(split.scratch, dtype=torch.float32, device=device) if split.scratch else None
    launched(
        query,
        own,
        extra,
        lengths,
        outputs,
        scratch=scratch,
        scale=params.softmax_scale * _LOG2_E,
        num_groups=split.groups,
        num_splits=launch_plan.equal_splits or split.splits,
        CONFIG=schedule.SparseDecodeConfig(
            format=kind,
            producer_threads=32 * producer_warps(kind),
            has_rope=params.head_dim == LATENT.value + ROPE.value,
            alignment=alignment,
            flat=flat,
            out_align=out_align,
            balanced=launch_plan.balanced,
            equal_splits=launch_plan.equal_splits is not None,
            overhead=split.overhead,
            granularity=launch_plan.granularity,
            cluster=in_cluster,
        ),
        num_warps=producer_warps(kind),
        launch_pdl=True,
    )
    if scratch is not None and launch_plan.equal_splits is not None:
        launch_combine_fp24(
            split, scratch, outputs, lengths, out_align, KEYS.value, equal_splits=launch_plan.equal_splits
        )
    elif scratch is not None:
        combine.launch_combine(split, scratch, outputs, out_align, 0, batch * s_q)


def _query(q: torch.Tensor, q_rope: torch.Tensor | None) -> SparseDecodeQuery:
    if q_rope is not None and (q.shape[3] != LATENT.value or not (_can_copy(q) and _can_copy(q_rope))):
        q, q_rope = query_parts.join(q, q_rope), None
    elif q_rope is None and not _can_copy(q):
        q = q.clone(memory_format=torch.contiguous_format)
    return SparseDecodeQuery(_query_rows(q), _NO_ROWS if q_rope is None else _query_rows(q_rope))


def _can_copy(q: torch.Tensor) -> bool:
    return row_align(q, _ALIGN) > 1 and all(stride // _ALIGN < 2**31 for stride in strides_in_use(q))


def _query_rows(q: torch.Tensor) -> SparseDecodeQueryRows:
    return SparseDecodeQueryRows(q, *(stride // _ALIGN for stride in strides_in_use(q)))


def _kind(layout: CacheFormat) -> int:
    if layout.tiling is not None:
        return (MODEL1 if layout.tiling.e8m0 else V32).value
    if layout.block_scaling is not None:
        return (V41_FP4 if layout.block_scaling.fp4 else V41).value
    return PLAIN.value


@functools.lru_cache(maxsize=4096)
def make_plan(
    num_sms: int,
    items: int,
    heads: int,
    topk: int,
    extra_topk: int,
    is_uniform: bool,
    has_scales: bool = True,
    batch_invariant: bool = False,
) -> SparseDecodeLaunchPlan:
    groups = -(-heads // ROWS.value)
    max_blocks = -(-topk // KEYS.value) + -(-extra_topk // KEYS.value)
    if is_uniform and has_scales and max_blocks > 2 and not batch_invariant:
        ranges = items * max_blocks
        # Reduces the time of "model1, b 2" by 15% (16.5 instead of 19.5 µs; docs/notes/sparse-decode.md).
        if ranges * groups <= num_sms and ranges * heads <= _MAX_BLOCK_ROWS:
            return _with_equal_splits(items, max_blocks, groups, ranges, granularity=1)
    # Otherwise a CTA processes blocks in pairs: shorter splits would only add partial outputs.
    max_pairs = -(-max_blocks // 2)
    ranges = plan.num_ranges(items, groups, num_sms, max_pairs, MLA_PARTIAL)
    if (
        ranges is None
        or batch_invariant
        or _whole_is_faster(items, heads, max_pairs, ranges, num_sms // groups, is_uniform)
    ):
        # A CTA processes the same group for all of its query tokens.
        ctas = min(items, max(num_sms // groups, 1)) * groups
        return SparseDecodeLaunchPlan(plan.whole(MLA_PARTIAL, items, groups, groups), ctas)
    # With few items, ranges should be as short as possible; with many, starting an item costs about two blocks.
    overhead = _OVERHEAD * int(2 * items >= ranges)
    if is_uniform and _longest_range(items, max_pairs, ranges, 0) < _longest_range(
        items, max_pairs, ranges, overhead // 2
    ):
        overhead = 0
    if is_uniform and 2 * items < ranges and ranges % items == 0:
        return _with_equal_splits(items, max_pairs, groups, ranges, granularity=2)
    return SparseDecodeLaunchPlan(
        plan.balanced(MLA_PARTIAL, items, max_pairs, groups, groups, ranges, overhead), ranges * groups
    )


def _whole_is_faster(items: int, heads: int, pairs: int, ranges: int, ctas: int, is_uniform: bool) -> bool:
    """Whether ``ctas`` CTAs with whole query tokens finish earlier than ranges followed by a combine kernel.

    Times are in pairs of blocks; the constants are measured (docs/notes/sparse-decode.md, "Whole query tokens or
    splits").
    """
    longest = -(-items // ctas) * pairs
    # Lengths on the device are unknown here: assume lists that are half full, but one that is full.
    in_a_range = items * pairs / ranges * (1 if is_uniform else 0.5)
    combining = 1 + min(items, ranges) * (-(-heads // ROWS.value) + heads / 16) / 100
    return longest <= max(in_a_range, 1) + combining


def _with_equal_splits(
    items: int, item_blocks: int, groups: int, ranges: int, granularity: int
) -> SparseDecodeLaunchPlan:
    split = plan.balanced(MLA_PARTIAL, items, item_blocks, groups, groups, ranges, overhead=0)
    split = replace(split, scratch=ranges * groups * FP24_PARTIAL.value, combines=False)
    return SparseDecodeLaunchPlan(split, ranges * groups, ranges // items, granularity)


def _longest_range(items: int, pairs: int, ranges: int, overhead: int) -> int:
    """Pairs of blocks of the longest range, for items of equal length that cost ``overhead`` pairs to start."""
    return -(-items * (pairs + overhead) // ranges) - overhead


def _selection(
    cache: torch.Tensor, indices: torch.Tensor, name: str, layout: CacheFormat
) -> tuple[CacheSelection, int, bool]:
    """``CacheSelection``, the alignment of tokens in bytes (at most 16), and whether all tokens are equally spaced
    (``flat``)."""
    addresses, alignment, flat = _address_of(
        cache.data_ptr() % 16,
        cache.shape[0],
        cache.shape[1],
        stride_in_use(cache, 0) * cache.element_size(),
        stride_in_use(cache, 1) * cache.element_size(),
        name,
        layout.tiling,
    )
    # A dummy page for an empty cache: rows are loaded before invalid indices are masked.
    readable = cache if cache.shape[0] else cache.new_empty((1, *cache.shape[1:]))
    return CacheSelection(readable, *addresses, indices, indices.stride(0), indices.stride(1)), alignment, flat


@functools.lru_cache(maxsize=4096)
def _address_of(
    misalignment: int, pages: int, page_size: int, page_bytes: int, token_bytes: int, name: str, tiling: Tiling | None
) -> tuple[tuple[int, int, int, int, int, int], int, bool]:
    """The address fields of ``CacheSelection``, and the other results of ``_selection``."""
    if tiling is not None:
        token_bytes = tiling.row_bytes
    alignment = math.gcd(16, misalignment, page_bytes, token_bytes)
    if alignment < 4:
        raise ValueError(f"{name} must have tokens at multiples of 4 bytes for backend='hopper', got {alignment}")
    slots = pages * page_size
    shift = (page_size - 1).bit_length()
    magic = -(-(1 << (31 + shift)) // page_size)
    has_scale_plane = tiling is not None and tiling.e8m0
    flat = not has_scale_plane and (pages == 1 or page_bytes == page_size * token_bytes)
    return (page_bytes, token_bytes, slots, page_size, magic, shift), alignment, flat
