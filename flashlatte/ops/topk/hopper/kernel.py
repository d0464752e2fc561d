"""The kernel: the k largest entries of a row, by one CTA or by the CTAs of a cluster."""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from flashlatte.kernels.hopper.ptx import shared_words
from flashlatte.kernels.triton.dependent_launch import gdc_launch_dependents, gdc_wait
from flashlatte.ops.topk.hopper.candidates import (
    append_candidates,
    load_candidates,
    load_first_block,
    locate_candidates,
)
from flashlatte.ops.topk.hopper.radix_select import (
    NEGATIVE_INFINITY,
    estimate_threshold,
    sample_size,
    store_largest_of_row,
)
from flashlatte.ops.topk.hopper.shared_layout import COUNTER, num_words
from flashlatte.ops.topk.hopper.store_largest import select_largest, store_in_order
from flashlatte.ops.topk.order import ordered, row_range, store_all
from flashlatte.runtime.triton_internals import ClusterLaunch
from flashlatte.runtime.triton_kernel import kernel


def topk_kernel(
    logits,
    start,
    end,
    indices,
    values,
    interpreted_memory,
    width: tl.int64,
    k: tl.int32,
    wanted: tl.int32,
    next_n: tl.int32,
    logits_stride: tl.int64,
    start_stride: tl.int64,
    end_stride: tl.int64,
    index_stride: tl.int64,
    value_stride: tl.int64,
    PER_REQUEST: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    SAMPLE_BLOCK: tl.constexpr,
    MASKED_BLOCK: tl.constexpr,
    FIRST_SAMPLE: tl.constexpr,
    PREFETCH: tl.constexpr,
    CTAS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Each cluster of CTAS CTAs processes one row.

    ``wanted``: target number of candidates, more than k and fewer than CAPACITY. FIRST_SAMPLE: maximum size of the
        first sample. PREFETCH: load the first block before the sample is processed. ``interpreted_memory``: int32 in
        place of shared memory in Triton's interpreter, else None.
    """
    if OVERLAPPED:
        # The preceding kernel in the stream may still run.
        gdc_wait()
        gdc_launch_dependents()
    program = tl.program_id(0)
    row = (program // CTAS).to(tl.int64)
    cta = program % CTAS
    first, last = row_range(start, end, row, width, start_stride, end_stride, next_n, PER_REQUEST)
    length = (last - first).to(tl.int32)
    first += row * logits_stride
    entries = logits + first
    index_row = indices + row * index_stride
    value_row = values
    if values is not None:
        value_row = values + row * value_stride
    memory = interpreted_memory if INTERPRETED else shared_words.allocate(num_words(CAPACITY))

    if length <= k:
        if cta == 0:
            store_all(entries, index_row, value_row, tl.arange(0, CAPACITY), length, k, INTERPRETED)
    else:
        begin, stop = column_range(cta, length, BLOCK, CTAS)
        low, count, source = list_candidates(
            logits,
            first,
            begin,
            stop,
            length,
            k,
            wanted,
            memory,
            CAPACITY,
            BLOCK,
            SAMPLE_BLOCK,
            FIRST_SAMPLE,
            PREFETCH,
            CTAS,
            INTERPRETED,
        )
        if is_sufficient(count, k, CAPACITY):
            valid = tl.arange(0, CAPACITY) < count
            bits, column = load_candidates(memory, source, valid, CTAS, INTERPRETED)
            if CTAS > 1:
                shared_words.cluster_arrive()
            keys = ordered(bits.to(tl.float32, bitcast=True), valid)
            selected = select_largest(keys, column, valid, low, length, k, memory, INTERPRETED)
            store_in_order(index_row, value_row, selected, bits, column, begin, stop, memory, CTAS, INTERPRETED)
            if CTAS > 1:
                # A CTA must not exit before all CTAs have read its list.
                shared_words.cluster_wait()
        else:
            # A CTA must not exit before all CTAs have read its counter.
            sync_row(CTAS)
            if cta == 0:
                store_largest_of_row(entries, index_row, value_row, length, k, memory, MASKED_BLOCK, INTERPRETED)


@triton.jit
def column_range(cta, length, BLOCK: tl.constexpr, CTAS: tl.constexpr):
    """Begin and end of the columns that a CTA lists and stores."""
    if CTAS == 1:
        return tl.zeros_like(length), length
    else:
        share = tl.cdiv(tl.cdiv(length, CTAS), BLOCK) * BLOCK
        begin = tl.minimum(cta * share, length)
        return begin, tl.minimum(begin + share, length)


@triton.jit
def list_candidates(
    logits,
    first,
    begin,
    stop,
    length,
    k,
    wanted,
    memory,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    SAMPLE_BLOCK: tl.constexpr,
    FIRST_SAMPLE: tl.constexpr,
    PREFETCH: tl.constexpr,
    CTAS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Build the list of candidates of a row, which begins at element ``first`` of ``logits``; each CTA lists columns
    ``begin`` to ``stop``. The threshold comes from a small sample, and if the list is not sufficient, from a larger
    one.

    Returns:
        low (int64): key of the threshold.
        count, source: number and addresses of the candidates (``locate_candidates``).
    """
    low = tl.full([], NEGATIVE_INFINITY, tl.int64)
    count = tl.zeros([], tl.int32)
    source = tl.zeros([CAPACITY], tl.int32)
    enough = sample_size(length, wanted)
    sample = tl.minimum(enough, FIRST_SAMPLE)
    retry = True
    while retry:
        if PREFETCH:  # in flight while the sample is processed
            loaded = load_first_block(logits, first + begin, stop - begin, BLOCK)
        shared_words.store(memory, COUNTER, tl.full([], 0, tl.int32), length > 0, INTERPRETED)
        if length > CAPACITY:
            low = estimate_threshold(logits + first, length, wanted, sample, memory, SAMPLE_BLOCK, INTERPRETED)
        tl.debug_barrier()
        if not PREFETCH:
            loaded = load_first_block(logits, first + begin, stop - begin, BLOCK)
        append_candidates(logits, first, begin, stop, value_of(low), loaded, memory, CAPACITY, BLOCK, INTERPRETED)
        sync_row(CTAS)
        count, source = locate_candidates(memory, CAPACITY, CTAS, INTERPRETED)
        retry = (sample < enough) & (is_sufficient(count, k, CAPACITY) == 0)
        sample = enough
        if retry:
            # All CTAs have read the counters before they are reset.
            sync_row(CTAS)
    return low, count, source


@triton.jit
def is_sufficient(count, k, CAPACITY: tl.constexpr):
    """Whether the list holds the k largest entries: at least k candidates, and no overflow."""
    return (count >= k) & (count <= CAPACITY)


@triton.jit
def sync_row(CTAS: tl.constexpr):
    """Synchronize all threads of a row, and make their writes visible to each other."""
    if CTAS > 1:
        shared_words.cluster_arrive()
        shared_words.cluster_wait()
    else:
        tl.debug_barrier()


@triton.jit
def value_of(key):
    """The float32 value of an ordered key (int64)."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


BY_ELEMENT = ("start", "end", "indices", "values")
kernel_1_cta = kernel(topk_kernel, by_element=BY_ELEMENT)
kernel_2_ctas = kernel(topk_kernel, by_element=BY_ELEMENT, cluster=ClusterLaunch(2, 0))
kernel_8_ctas = kernel(topk_kernel, by_element=BY_ELEMENT, cluster=ClusterLaunch(8, 0))
