"""The kernel: the k largest entries of a row, by one CTA or by the CTAs of a cluster."""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from flashlatte.kernels.hopper.ptx import shared_words
from flashlatte.kernels.triton.block_tables import RowTables
from flashlatte.kernels.triton.dependent_launch import gdc_launch_dependents, gdc_wait
from flashlatte.ops.topk.hopper.candidates import (
    TopkRow,
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
from flashlatte.ops.topk.hopper.short_row import PART, SHORT_ROW, store_largest_of_short_row
from flashlatte.ops.topk.hopper.store_largest import select_largest, store_in_order
from flashlatte.ops.topk.order import TopkRows, ordered, row_range
from flashlatte.ops.topk.outputs import RowResults, TopkOutputs, row_table_of, store_all
from flashlatte.runtime.triton_internals import ClusterLaunch
from flashlatte.runtime.triton_kernel import INTERPRETED, kernel


class TopkConfig(NamedTuple):
    """The compile-time constants of the kernel.

    Attributes:
        per_request: ``end`` has an entry for each request.
        capacity: maximum number of candidates in the list.
        block, masked_block, sample_block: entries that a CTA processes at a time: of the list pass, of the radix select
            on the row, and of a sample.
        first_sample: maximum size of the first sample.
        short_rows: the first CTA of a row selects from up to SHORT_ROW entries in registers.
        prefetch: load the first block before the sample is processed.
        ctas: CTAs of a row.
        overlapped: the preceding kernel in the stream may still run.
    """

    per_request: bool
    capacity: int
    block: int
    sample_block: int
    masked_block: int
    first_sample: int
    short_rows: bool
    prefetch: bool
    ctas: int
    overlapped: bool


def topk_kernel(
    rows: TopkRows,
    outputs: TopkOutputs,
    tables: RowTables,
    interpreted_memory,
    target: tl.int32,
    CONFIG: tl.constexpr,
):
    """Each cluster of CTAs processes one row.

    ``target``: target number of candidates, more than k and fewer than the capacity. ``interpreted_memory``: int32 in
        place of shared memory in Triton's interpreter, else None.
    """
    CAPACITY: tl.constexpr = CONFIG.capacity
    CTAS: tl.constexpr = CONFIG.ctas
    if CONFIG.overlapped:
        gdc_wait()
        gdc_launch_dependents()
    program = tl.program_id(0)
    number = (program // CTAS).to(tl.int64)
    cta = program % CTAS
    first, last = row_range(rows, number, CONFIG.per_request)
    length = (last - first).to(tl.int32)
    first += number * rows.stride
    entries = rows.logits + first
    results = RowResults(
        outputs.indices + number * outputs.index_stride,
        None if outputs.top_values is None else outputs.top_values + number * outputs.value_stride,
        None if tables.block_table is None else row_table_of(tables, number),
    )
    k = outputs.k
    memory = interpreted_memory if INTERPRETED else shared_words.allocate(num_words(CAPACITY))

    if length <= k:
        if cta == 0:
            store_all(entries, results, length, k, CAPACITY, CONFIG.masked_block)
    elif CONFIG.short_rows:
        if length <= PART:
            if cta == 0:
                store_largest_of_short_row(entries, results, length, k, memory, PART, CAPACITY)
        elif length <= SHORT_ROW:
            if cta == 0:
                store_largest_of_short_row(entries, results, length, k, memory, SHORT_ROW, CAPACITY)
        else:
            store_largest_of_long_row(rows.logits, first, results, length, k, target, cta, memory, CONFIG)
    else:
        store_largest_of_long_row(rows.logits, first, results, length, k, target, cta, memory, CONFIG)


@triton.jit
def store_largest_of_long_row(logits, first, results, length, k, target, cta, memory, CONFIG: tl.constexpr):
    """Store the k largest of the ``length`` > k entries from element ``first`` on, by all CTAs of the row."""
    CAPACITY: tl.constexpr = CONFIG.capacity
    CTAS: tl.constexpr = CONFIG.ctas
    begin, stop = column_range(cta, length, CONFIG.block, CTAS)
    row = TopkRow(logits, first, length, begin, stop)
    low, count, source = list_candidates(row, k, target, memory, CONFIG)
    if is_sufficient(count, k, CAPACITY):
        valid = tl.arange(0, CAPACITY) < count
        bits, column = load_candidates(memory, source, valid, CTAS)
        if CTAS > 1:
            shared_words.cluster_arrive()
        keys = ordered(bits.to(tl.float32, bitcast=True), valid)
        selected = select_largest(keys, column, valid, low, length, k, memory, 10)
        if CTAS > 1 and results.table is not None:
            # All CTAs have read the list before it is replaced.
            shared_words.cluster_wait()
        store_in_order(results, selected, bits, column, begin, stop, memory, CAPACITY, CTAS)
        if CTAS > 1 and results.table is None:
            # A CTA must not exit before all CTAs have read its list.
            shared_words.cluster_wait()
    else:
        # A CTA must not exit before all CTAs have read its counter.
        sync_row(CTAS)
        if cta == 0:
            store_largest_of_row(logits + first, results, length, k, memory, CONFIG.masked_block)


@triton.jit
def column_range(cta, length, BLOCK: tl.constexpr, CTAS: tl.constexpr):
    """Begin and end of the columns that a CTA lists and stores."""
    if CTAS == 1:
        return tl.zeros_like(length), length
    else:
        columns = tl.cdiv(tl.cdiv(length, CTAS), BLOCK) * BLOCK
        begin = tl.minimum(cta * columns, length)
        return begin, tl.minimum(begin + columns, length)


@triton.jit
def list_candidates(row, k, target, memory, CONFIG: tl.constexpr):
    """Build the list of candidates of a row. The threshold comes from a small sample, and if the list is not
    sufficient, from a larger one.

    Returns:
        low (int64): key of the threshold.
        count, source: number and addresses of the candidates (``locate_candidates``).
    """
    CAPACITY: tl.constexpr = CONFIG.capacity
    SAMPLE_BLOCK: tl.constexpr = CONFIG.sample_block
    low = tl.full([], NEGATIVE_INFINITY, tl.int64)
    count = tl.zeros([], tl.int32)
    source = tl.zeros([CAPACITY], tl.int32)
    enough = sample_size(row.length, target)
    sample = tl.minimum(enough, CONFIG.first_sample)
    retry = True
    while retry:
        if CONFIG.prefetch:  # in flight while the sample is processed
            loaded = load_first_block(row, CONFIG.block)
        shared_words.store(memory, COUNTER, tl.full([], 0, tl.int32), row.length > 0)
        if row.length > CAPACITY:
            entries = row.logits + row.first
            low = estimate_threshold(entries, row.length, target, sample, memory, SAMPLE_BLOCK)
        tl.debug_barrier()
        if not CONFIG.prefetch:
            loaded = load_first_block(row, CONFIG.block)
        append_candidates(row, value_of(low), loaded, memory, CONFIG)
        sync_row(CONFIG.ctas)
        count, source = locate_candidates(memory, CAPACITY, CONFIG.ctas)
        retry = (sample < enough) & (is_sufficient(count, k, CAPACITY) == 0)
        sample = enough
        if retry:
            # All CTAs have read the counters before they are reset.
            sync_row(CONFIG.ctas)
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


kernel_1_cta = kernel(topk_kernel)
kernel_2_ctas = kernel(topk_kernel, cluster=ClusterLaunch(2, 0))
kernel_8_ctas = kernel(topk_kernel, cluster=ClusterLaunch(8, 0))
