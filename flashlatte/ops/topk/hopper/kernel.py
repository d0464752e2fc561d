"""The k largest of a row, by a CTA or by the CTAs of a cluster."""

# Triton's annotations and calls are not Python's.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from flashlatte.kernels.hopper.ptx import shared_words
from flashlatte.ops.topk.hopper.candidates import list_reaching, store_largest_of_list
from flashlatte.ops.topk.hopper.memory import COUNTER, words
from flashlatte.ops.topk.hopper.rows import NEGATIVE_INFINITY, store_largest_of_row, suggested_threshold
from flashlatte.ops.topk.order import row_range, store_all
from flashlatte.runtime.triton_internals import Cluster
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
    GROUP: tl.constexpr,
    CTAS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """``wanted``: how many entries of a row should be listed, more than k and fewer than CAPACITY.

    ``interpreted_memory``: int32 that stand for shared memory in Triton's interpreter, else None.
    """
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
        shared_words.store(memory, COUNTER, tl.full([], 0, tl.int32), cta == 0, INTERPRETED)
        if CTAS > 1:
            shared_words.cluster_arrive()
        low = tl.full([], NEGATIVE_INFINITY, tl.int64)
        if length > CAPACITY:
            low = suggested_threshold(entries, length, wanted, memory, SAMPLE_BLOCK, INTERPRETED)
        threshold = value_of(low)
        if CTAS > 1:
            chunk = tl.cdiv(tl.cdiv(length, CTAS), BLOCK) * BLOCK
            begin = tl.minimum(cta * chunk, length)
            stop = tl.minimum(begin + chunk, length)
            shared_words.cluster_meet()
            target = shared_words.of_first_cta(memory)
            list_reaching(logits, first, begin, stop, threshold, target, CAPACITY, BLOCK, True, INTERPRETED)
            shared_words.cluster_arrive()
            shared_words.cluster_meet()
        else:
            tl.debug_barrier()
            list_reaching(logits, first, 0, length, threshold, memory, CAPACITY, BLOCK, False, INTERPRETED)
            tl.debug_barrier()
        if cta == 0:
            count = shared_words.load(memory, COUNTER, length >= 0, INTERPRETED)
            if (count >= k) & (count <= CAPACITY):
                store_largest_of_list(index_row, value_row, count, low, length, k, memory, GROUP, INTERPRETED)
            else:
                store_largest_of_row(entries, index_row, value_row, length, k, memory, MASKED_BLOCK, INTERPRETED)


@triton.jit
def value_of(key):
    """The float32 of an ordered key, int64."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


BY_ELEMENT = ("start", "end", "indices", "values")
kernel_of_one = kernel(topk_kernel, by_element=BY_ELEMENT)
kernel_of_two = kernel(topk_kernel, by_element=BY_ELEMENT, cluster=Cluster(2, 0))
kernel_of_eight = kernel(topk_kernel, by_element=BY_ELEMENT, cluster=Cluster(8, 0))
