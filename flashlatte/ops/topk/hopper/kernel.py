"""The k largest of a row, by a CTA or by the CTAs of a cluster."""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from flashlatte.kernels.hopper.ptx import shared_words
from flashlatte.kernels.triton.dependent_launch import gdc_launch_dependents, gdc_wait
from flashlatte.ops.topk.hopper.candidates import first_block, list_reaching, load_listed, places_of_listed
from flashlatte.ops.topk.hopper.largest import are_largest, store_in_order
from flashlatte.ops.topk.hopper.memory import COUNTER, words
from flashlatte.ops.topk.hopper.rows import (
    NEGATIVE_INFINITY,
    entries_of_sample,
    store_largest_of_row,
    suggested_threshold,
)
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
    EARLY: tl.constexpr,
    CTAS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """A row by each cluster of CTAS, or by each CTA.

    ``wanted``: how many entries of a row should be listed, more than k and fewer than CAPACITY. FIRST_SAMPLE: entries
    that are sampled at first, at most. EARLY: load the first block meanwhile. ``interpreted_memory``: int32 that stand
    for shared memory in Triton's interpreter, else None.
    """
    if OVERLAPPED:
        # The kernel before this one in the stream may still run.
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
    memory = interpreted_memory if INTERPRETED else shared_words.allocate(words(CAPACITY))

    if length <= k:
        if cta == 0:
            store_all(entries, index_row, value_row, tl.arange(0, CAPACITY), length, k, INTERPRETED)
    else:
        begin, stop = part_of(cta, length, BLOCK, CTAS)
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
            EARLY,
            CTAS,
            INTERPRETED,
        )
        if will_do(count, k, CAPACITY):
            there = tl.arange(0, CAPACITY) < count
            bits, column = load_listed(memory, source, there, CTAS, INTERPRETED)
            if CTAS > 1:
                shared_words.cluster_arrive()
            keys = ordered(bits.to(tl.float32, bitcast=True), there)
            chosen = are_largest(keys, column, there, low, length, k, memory, INTERPRETED)
            store_in_order(index_row, value_row, chosen, bits, column, begin, stop, memory, CTAS, INTERPRETED)
            if CTAS > 1:
                # A CTA is there until all have read its list.
                shared_words.cluster_meet()
        else:
            # As above, of how many it listed.
            meet(CTAS)
            if cta == 0:
                store_largest_of_row(entries, index_row, value_row, length, k, memory, MASKED_BLOCK, INTERPRETED)


@triton.jit
def part_of(cta, length, BLOCK: tl.constexpr, CTAS: tl.constexpr):
    """The first column that a CTA lists and stores, and the one behind its last."""
    if CTAS == 1:
        return tl.zeros_like(length), length
    else:
        part = tl.cdiv(tl.cdiv(length, CTAS), BLOCK) * BLOCK
        begin = tl.minimum(cta * part, length)
        return begin, tl.minimum(begin + part, length)


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
    EARLY: tl.constexpr,
    CTAS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """List what reaches a threshold of a row from element ``first`` of ``logits`` on, each CTA from column ``begin`` to
    ``stop``: from a small sample first, and where that ``will_do`` not, from a larger one.

    Returns:
        low (int64): the threshold's key.
        count, source: of all CTAs' lists (``places_of_listed``).
    """
    low = tl.full([], NEGATIVE_INFINITY, tl.int64)
    count = tl.zeros([], tl.int32)
    source = tl.zeros([CAPACITY], tl.int32)
    enough = entries_of_sample(length, wanted)
    sample = tl.minimum(enough, FIRST_SAMPLE)
    again = True
    while again:
        if EARLY:  # it is on its way while the sample is looked at
            loaded = first_block(logits, first + begin, stop - begin, BLOCK)
        shared_words.store(memory, COUNTER, tl.full([], 0, tl.int32), length > 0, INTERPRETED)
        if length > CAPACITY:
            low = suggested_threshold(logits + first, length, wanted, sample, memory, SAMPLE_BLOCK, INTERPRETED)
        tl.debug_barrier()
        if not EARLY:
            loaded = first_block(logits, first + begin, stop - begin, BLOCK)
        list_reaching(logits, first, begin, stop, value_of(low), loaded, memory, CAPACITY, BLOCK, INTERPRETED)
        meet(CTAS)
        count, source = places_of_listed(memory, CAPACITY, CTAS, INTERPRETED)
        again = (sample < enough) & (will_do(count, k, CAPACITY) == 0)
        sample = enough
        if again:
            # All have read how many the others listed: those may list anew.
            meet(CTAS)
    return low, count, source


@triton.jit
def will_do(count, k, CAPACITY: tl.constexpr):
    """Whether the k largest of a row are among ``count`` listed entries, all of which there was room for."""
    return (count >= k) & (count <= CAPACITY)


@triton.jit
def meet(CTAS: tl.constexpr):
    """All threads of a row wait for each other, and see what the others have written."""
    if CTAS > 1:
        shared_words.cluster_arrive()
        shared_words.cluster_meet()
    else:
        tl.debug_barrier()


@triton.jit
def value_of(key):
    """The float32 of an ordered key, int64."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


BY_ELEMENT = ("start", "end", "indices", "values")
kernel_of_one = kernel(topk_kernel, by_element=BY_ELEMENT)
kernel_of_two = kernel(topk_kernel, by_element=BY_ELEMENT, cluster=ClusterLaunch(2, 0))
kernel_of_eight = kernel(topk_kernel, by_element=BY_ELEMENT, cluster=ClusterLaunch(8, 0))
