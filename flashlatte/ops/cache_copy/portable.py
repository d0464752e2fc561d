"""Page copies in Triton: bytes of any format, in one launch, between memories that the GPU can address."""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton.language as tl

from flashlatte.kernels.triton.cache_layout import alignment_bytes, as_bytes, cdiv
from flashlatte.kernels.triton.row_copy import word_bytes, words_at
from flashlatte.runtime.kernel_records import Int64, Pointer
from flashlatte.runtime.strides import stride_in_use
from flashlatte.runtime.triton_kernel import kernel

SCRATCH_BYTES = 64 * 2**20
BLOCK_BYTES = 8192
NUM_WARPS = 4


class PageMemory(NamedTuple):
    """Pages in memory, with their stride in bytes and their number."""

    memory: torch.Tensor
    stride: int
    count: int


class PageBytes(NamedTuple):
    """One side of a copy. ``stride`` and ``first`` are in units of ALIGN bytes.

    Attributes:
        first: first byte of a page that is copied.
        pages: the page of each pair.
        count: pages of the cache, beyond which a pair is skipped. ``memory`` may be scratch instead of the cache.
    """

    memory: Pointer
    stride: Int64
    first: Int64
    pages: Pointer
    list_stride: Int64
    count: Int64


def copy_pages(
    src_cache: torch.Tensor | None,
    dst_cache: torch.Tensor,
    src_pages: torch.Tensor,
    dst_pages: torch.Tensor,
    disjoint: bool,
) -> None:
    source = _pages(dst_cache if src_cache is None else src_cache)
    target = _pages(dst_cache)
    page_bytes = math.prod(dst_cache.shape[1:]) * dst_cache.element_size()
    lists = (src_pages, dst_pages)
    if disjoint:
        _launch(source, target, lists, 0, page_bytes)
    else:
        _copy_through_scratch(source, target, lists, page_bytes)


def _copy_through_scratch(
    source: PageMemory, target: PageMemory, lists: tuple[torch.Tensor, torch.Tensor], page_bytes: int
) -> None:
    # Copy all pages through scratch, a slice of each page at a time, so that all reads precede all writes.
    num_pairs = lists[0].shape[0]
    slice_bytes = min(max(SCRATCH_BYTES // num_pairs // 16, 1) * 16, -(-page_bytes // 16) * 16)
    memory = torch.empty(num_pairs * slice_bytes, dtype=torch.uint8, device=lists[0].device)
    scratch = PageMemory(memory, slice_bytes, num_pairs)
    for first in range(0, page_bytes, slice_bytes):
        stop = min(first + slice_bytes, page_bytes)
        _launch(source, target, lists, first, stop, scratch, to_scratch=True)
        _launch(source, target, lists, first, stop, scratch, to_scratch=False)


def _pages(cache: torch.Tensor) -> PageMemory:
    return PageMemory(as_bytes(cache), stride_in_use(cache, 0) * cache.element_size(), cache.shape[0])


def _launch(
    source: PageMemory,
    target: PageMemory,
    lists: tuple[torch.Tensor, torch.Tensor],
    first: int,
    stop: int,
    scratch: PageMemory | None = None,
    to_scratch: bool = False,
) -> None:
    """Copy bytes ``first`` to ``stop`` of pages. If ``scratch`` is given, it is the source or the target."""
    reads = source if scratch is None or to_scratch else scratch
    writes = scratch if scratch is not None and to_scratch else target
    src_first, dst_first = (0 if side is scratch else first for side in (reads, writes))
    aligned = (alignment_bytes(reads.memory), alignment_bytes(writes.memory), reads.stride, writes.stride)
    unit = math.gcd(*aligned, src_first, dst_first, stop - first)
    num_blocks = cdiv(stop - first, BLOCK_BYTES)
    copy_pages_kernel[(lists[0].shape[0] * num_blocks,)](
        PageBytes(reads.memory, reads.stride // unit, src_first // unit, lists[0], lists[0].stride(0), source.count),
        PageBytes(writes.memory, writes.stride // unit, dst_first // unit, lists[1], lists[1].stride(0), target.count),
        length=(stop - first) // unit,
        num_blocks=num_blocks,
        ALIGN=unit,
        FROM_SCRATCH=reads is scratch,
        TO_SCRATCH=writes is scratch,
        BLOCK=BLOCK_BYTES // word_bytes(unit),
        num_warps=NUM_WARPS,
    )


@kernel
def copy_pages_kernel(
    src: PageBytes,
    dst: PageBytes,
    length: tl.int64,
    num_blocks: tl.int64,
    ALIGN: tl.constexpr,
    FROM_SCRATCH: tl.constexpr,
    TO_SCRATCH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy a block of ``length`` · ALIGN bytes of a pair's pages. Scratch has a page for each pair."""
    program = tl.program_id(0).to(tl.int64)
    pair = program // num_blocks
    src_page = tl.load(src.pages + pair * src.list_stride).to(tl.int64)
    dst_page = tl.load(dst.pages + pair * dst.list_stride).to(tl.int64)
    exists = (src_page >= 0) & (src_page < src.count) & (dst_page >= 0) & (dst_page < dst.count)
    if exists:
        src_page = pair if FROM_SCRATCH else src_page
        dst_page = pair if TO_SCRATCH else dst_page
        src_words = words_at(src.memory, src_page * src.stride + src.first, ALIGN)
        dst_words = words_at(dst.memory, dst_page * dst.stride + dst.first, ALIGN)
        # [BLOCK]
        word = (program % num_blocks) * BLOCK + tl.arange(0, BLOCK)
        inside = word < length * (ALIGN // 4 if ALIGN >= 4 else ALIGN)
        tl.store(dst_words + word, tl.load(src_words + word, mask=inside, other=0), mask=inside)
