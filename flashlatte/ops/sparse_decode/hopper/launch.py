"""From arguments to launches: all that a call settles on the host, from shapes and strides alone."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from flashlatte.kernels.hopper.mla_tiles import KEYS, LATENT, ROPE, ROWS
from flashlatte.kv_cache.formats import CacheFormat, Tiling
from flashlatte.ops.sparse_decode.hopper import even_records
from flashlatte.ops.sparse_decode.hopper.kernel import kernel, paired_kernel
from flashlatte.ops.sparse_decode.hopper.tiles import MODEL1, PLAIN, V32, producer_warps
from flashlatte.runtime import dispatch
from flashlatte.runtime.strides import stride_in_use, strides_in_use
from flashlatte.runtime.triton_internals import clusters_fill
from flashlatte.runtime.triton_kernel import launching_on
from flashlatte.split_kv import combine, output_rows, plan

_LOG2_E = math.log2(math.e)
# What starting on an item costs, in blocks, where there are many items.
_OVERHEAD = 2
# Rows of partial results that parts of one block may leave to be merged: with more, longer parts take less time.
_MOST_BLOCK_ROWS = 3000
# Numbers of bf16 in 16 bytes, what the copies of q need rows to be aligned to.
_ALIGN = 8


@dataclass(frozen=True)
class Plan:
    """What the calls of one shape have in common.

    Attributes:
        num_groups: programs that each need all keys of an item.
        parts: of the balanced schedule; None for whole items.
        programs: of the launch.
        scratch: float32 numbers of the partial results and what the parts note of them.
        overhead: what starting on an item costs, in blocks.
        even: whether all items are split into equally many parts.
        grain: blocks that a program takes at a time: two, or one where each part is one block.
    """

    num_groups: int
    parts: int | None
    programs: int
    scratch: int
    overhead: int
    even: bool
    grain: int = 2


@dataclass(frozen=True)
class Address:
    """A cache, as the kernel takes it: see ``selection.Cache`` and ``schedule.Plan``."""

    arguments: tuple[int, ...]
    unit: int
    flat: bool


def sparse_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    layout: CacheFormat,
    topk_length: torch.Tensor | None,
    attn_sink: torch.Tensor | None,
    extra_k_cache: torch.Tensor | None,
    extra_indices: torch.Tensor | None,
    extra_topk_length: torch.Tensor | None,
    softmax_scale: float,
    empty_lse: float,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    batch, s_q, h_q, head_dim = q.shape
    device = q.device
    topk = indices.shape[2]
    extra_topk = 0 if extra_indices is None else extra_indices.shape[2]
    is_uniform = topk_length is None and extra_topk_length is None
    has_scales = layout.tiling is not None
    kind = (MODEL1 if layout.tiling.e8m0 else V32).value if layout.tiling is not None else PLAIN.value
    made = make_plan(dispatch.multiprocessors(device), batch * s_q, h_q, topk, extra_topk, is_uniform, has_scales)
    address = _address(k_cache, "k_cache", layout)
    unit, flat = address.unit, address.flat
    extra_address = address
    if extra_k_cache is not None and extra_indices is not None:
        extra_address = _address(extra_k_cache, "extra_k_cache", layout)
        unit, flat = min(unit, extra_address.unit), flat and extra_address.flat
        if extra_indices.dtype != indices.dtype:
            # The kernel takes blocks of both lists in turn.
            indices, extra_indices = indices.long(), extra_indices.long()
    k_cache, extra_k_cache = _readable(k_cache), _readable(extra_k_cache)
    q_strides = strides_in_use(q)
    if q.data_ptr() % 16 or any(stride % _ALIGN or stride // _ALIGN >= 2**31 for stride in q_strides):
        q = q.clone(memory_format=torch.contiguous_format)
        q_strides = strides_in_use(q)
    q_request, q_token, q_head = q_strides
    out_align = _ALIGN if out.data_ptr() % 16 == 0 and all(s % _ALIGN == 0 for s in strides_in_use(out)) else 1
    lists = (
        batch * s_q,
        s_q,
        topk_length,
        *_length_strides(topk_length),
        topk,
        extra_topk_length,
        *_length_strides(extra_topk_length),
        None if extra_indices is None else extra_topk,
    )
    outputs = output_rows.output_arguments(out, lse, attn_sink, h_q, h_q, empty_lse, out_align)

    with launching_on(device):
        # Two programs that need the same tokens share the work of widening them.
        paired = has_scales and made.grain == 2 and made.num_groups % 2 == 0 and clusters_fill(device, 2)
        launched = paired_kernel[(made.programs // 2,)] if paired else kernel[(made.programs,)]
        splits = (made.parts or 1) // (batch * s_q)
        scratch = torch.empty(made.scratch, dtype=torch.float32, device=device) if made.scratch else None
        launched(
            q,
            q_request // _ALIGN,
            q_token // _ALIGN,
            q_head // _ALIGN,
            k_cache,
            *address.arguments,
            indices,
            indices.stride(0),
            indices.stride(1),
            extra_k_cache,
            *extra_address.arguments,
            extra_indices,
            0 if extra_indices is None else extra_indices.stride(0),
            0 if extra_indices is None else extra_indices.stride(1),
            *lists[:-1],
            extra_topk,
            *outputs[:-3],
            h_q,
            empty_lse,
            scratch,
            softmax_scale * _LOG2_E,
            made.num_groups,
            splits if made.even else made.parts or 1,
            FORMAT=kind,
            HAS_ROPE=head_dim == LATENT.value + ROPE.value,
            UNIT=unit,
            FLAT=flat,
            OUT_ALIGN=out_align,
            BALANCED=made.parts is not None,
            EVEN=made.even,
            OVERHEAD=made.overhead,
            GRAIN=made.grain,
            PAIRED=paired,
            num_warps=producer_warps(kind),
            enable_fp_fusion=True,
            launch_pdl=True,
        )
        if made.even:
            even_records.launch_merge(
                scratch,
                (*outputs[:-3], s_q, h_q, empty_lse),
                items=batch * s_q,
                heads=h_q,
                splits=splits,
                out_align=out_align,
            )
        elif scratch is not None:
            combine.launch_combine(
                scratch,
                lists,
                outputs,
                items=batch * s_q,
                num_groups=made.num_groups,
                row_blocks=made.num_groups,
                parts=made.parts,
                block_n=KEYS.value,
                block_h=ROWS.value,
                d_v=LATENT.value,
                overhead=made.overhead,
                row_align=out_align,
                noted=True,
            )


@functools.lru_cache(maxsize=4096)
def make_plan(
    multiprocessors: int,
    items: int,
    heads: int,
    topk: int,
    extra_topk: int,
    is_uniform: bool,
    has_scales: bool = True,
) -> Plan:
    groups = -(-heads // ROWS.value)
    most_blocks = -(-topk // KEYS.value) + -(-extra_topk // KEYS.value)
    if is_uniform and has_scales and most_blocks > 2:
        parts = items * most_blocks
        if parts * groups <= multiprocessors and parts * heads <= _MOST_BLOCK_ROWS:
            return Plan(groups, parts, parts * groups, parts * groups * even_records.RECORD.value, 0, True, grain=1)
    # Else a program takes blocks in pairs: a part of less would only make more to merge.
    most_pairs = -(-most_blocks // 2)
    record = combine.record_bytes(ROWS.value, LATENT.value)
    parts = plan.balanced_parts(items, groups, multiprocessors, most_pairs, record, uniform=is_uniform)
    # One item more than there are: what a part has not taken begins after the last one.
    if parts is None or (items + 1) * (max(most_blocks, 1) + _OVERHEAD) > plan.MOST_COST:
        # Every program has the same group for all of its items.
        programs = min(items, max(multiprocessors // groups, 1)) * groups
        return Plan(groups, None, programs, 0, 0, False)
    # With few items a part should be as short as can be; with many, an item begun costs about two blocks.
    overhead = _OVERHEAD * int(2 * items >= parts)
    if is_uniform and _most_pairs(items, most_pairs, parts, 0) < _most_pairs(items, most_pairs, parts, overhead // 2):
        overhead = 0
    if is_uniform and 2 * items < parts and parts % items == 0:
        return Plan(groups, parts, parts * groups, parts * groups * even_records.RECORD.value, 0, True)
    # Behind the records, what the parts note for the merging.
    scratch = 2 * groups * parts * record // 4 + parts
    return Plan(groups, parts, parts * groups, scratch, overhead, False)


def _most_pairs(items: int, pairs: int, parts: int, overhead: int) -> int:
    """Pairs of the longest part, of items with equally many, where starting on an item costs ``overhead`` pairs."""
    return -(-items * (pairs + overhead) // parts) - overhead


def _address(cache: torch.Tensor, name: str, layout: CacheFormat) -> Address:
    return _address_of(
        cache.data_ptr() % 16,
        cache.shape[0],
        cache.shape[1],
        stride_in_use(cache, 0) * cache.element_size(),
        stride_in_use(cache, 1) * cache.element_size(),
        name,
        layout.tiling,
    )


@functools.lru_cache(maxsize=4096)
def _address_of(
    misalignment: int, pages: int, page_size: int, page_bytes: int, token_bytes: int, name: str, tiling: Tiling | None
) -> Address:
    if tiling is not None:
        token_bytes = tiling.row_bytes
    unit = math.gcd(16, misalignment, page_bytes, token_bytes)
    if unit < 4:
        raise ValueError(f"{name} must have tokens at multiples of 4 bytes for backend='hopper', got {unit}")
    if max(page_bytes, token_bytes) >= 2**31:
        raise ValueError(f"{name} must have pages of less than 2^31 bytes for backend='hopper', got {page_bytes}")
    slots = pages * page_size
    if slots >= 2**31:
        raise ValueError(f"{name} must have less than 2^31 tokens for backend='hopper', got {slots}")
    shift = (page_size - 1).bit_length()
    magic = -(-(1 << (31 + shift)) // page_size)
    has_scale_plane = tiling is not None and tiling.e8m0
    flat = not has_scale_plane and (pages == 1 or page_bytes == page_size * token_bytes)
    return Address((page_bytes, token_bytes, slots, page_size, magic, shift), unit, flat)


def _readable(cache: torch.Tensor | None) -> torch.Tensor | None:
    """The cache, or a page that no index selects in place of no pages: rows are read before they are selected."""
    if cache is None or cache.shape[0]:
        return cache
    return cache.new_empty((1, *cache.shape[1:]))


def _length_strides(lengths: torch.Tensor | None) -> tuple[int, int]:
    """Strides over requests and tokens of lengths [b] or [b, s_q]."""
    if lengths is None:
        return 0, 0
    return lengths.stride(0), lengths.stride(1) if lengths.dim() == 2 else 0
