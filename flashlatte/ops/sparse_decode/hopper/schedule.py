"""The schedule of a CTA: ``split_kv.device`` for sparse decode.

A work item is a query token of a request. Its blocks are those of its own list, 64 indices each, followed by those of
its list into the extra cache.
"""

# Triton's annotations and calls are not Python's.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.mla_tiles import KEYS
from flashlatte.kernels.hopper.ptx.registers import opaque
from flashlatte.split_kv import device, ranges
from flashlatte.split_kv.gluon_device import PARTIAL, scan_items

# Work items that a warp reads with one load per lane. For so many, one request with topk_length takes 0.90 to 0.97
# of the time in a model, whose weights evict the code from the L2, and 0.93 to 0.98 otherwise.
_FEW_ITEMS = gl.constexpr(32)


class SparseDecodeWork(NamedTuple):
    """The work of a CTA.

    Attributes:
        range: its work items and costs (``ranges.Range``).
        stride: distance between the CTA's items.
        number: index of the range.
        num_splits: number of balanced ranges, or splits per work item.
        group: index of its group of 64 heads.
        num_groups: groups of a work item.
    """

    range: Any
    stride: Any
    number: Any
    num_splits: Any
    group: Any
    num_groups: Any


class SparseDecodeConfig(NamedTuple):
    """Compile-time configuration of the kernel.

    Attributes:
        format: ``tiles.PLAIN``, ``V32``, ``MODEL1``, ``V41`` or ``V41_FP4``.
        producer_threads: threads of the producer, the default partition.
        has_rope: whether rows have 64 columns of rope after the 512 of the latent.
        alignment: alignment in bytes of tokens in the caches, at most 16.
        flat: whether tokens are equally spaced across all pages. The shorter address code reduces the time of
            "v32, b 2" by a third (21.7 instead of 31.8 µs; docs/notes/sparse-decode.md).
        out_align: unit of the strides of ``out`` in elements: 8 if its rows are aligned to 16 bytes, else 1.
        balanced: whether CTAs process ranges of equal cost; otherwise whole work items.
        equal_splits: whether all work items have the same number of splits, ``num_splits``.
        overhead: cost of starting a work item, in blocks.
        granularity: blocks that a CTA processes at a time: two, or one if each split is one block (``one_block``).
        cluster: whether CTAs of adjacent groups exchange dequantized tokens (``clusters``).
    """

    format: Any
    producer_threads: Any
    has_rope: Any
    alignment: Any
    flat: Any
    out_align: Any
    balanced: Any
    equal_splits: Any
    overhead: Any
    granularity: Any
    cluster: Any


class SparseDecodeSplit(NamedTuple):
    """The split of a work item that a CTA processes.

    Attributes:
        begin, end: blocks, end exclusive.
        blocks: blocks of the work item.
        own: blocks of its own list.
        length, extra_length: lengths of its lists.
    """

    begin: Any
    end: Any
    blocks: Any
    own: Any
    length: Any
    extra_length: Any


@gluon.jit
def find_work(key_lengths, num_splits, num_groups, CONFIG: gl.constexpr):
    """The work of this CTA. CTAs of the same range have adjacent program ids, so that all but the first read from
    L2."""
    cta = gl.program_id(0)
    group = cta % num_groups
    number = cta // num_groups
    if CONFIG.balanced:
        if CONFIG.equal_splits:
            cta_range = _find_equal_range(number, num_splits, key_lengths, CONFIG.granularity)
        else:
            if key_lengths.num_items <= _FEW_ITEMS:
                cta_range = ranges.find_range(
                    number,
                    num_splits,
                    key_lengths,
                    KEYS,
                    CONFIG.overhead,
                    CONFIG.granularity,
                    items=scan_items(_FEW_ITEMS),
                )
            else:
                cta_range = ranges.find_range(
                    number, num_splits, key_lengths, KEYS, CONFIG.overhead, CONFIG.granularity, items=scan_items()
                )
        return SparseDecodeWork(cta_range, 1, number, num_splits, group, num_groups)
    else:
        nothing = gl.to_tensor(0)
        cta_range = ranges.Range(nothing, nothing, number, key_lengths.num_items, nothing)
        return SparseDecodeWork(cta_range, gl.num_programs(0) // num_groups, number, num_splits, group, num_groups)


@gluon.jit
def _find_equal_range(number, splits, key_lengths, GRANULARITY: gl.constexpr):
    """A range for work items of equal length with ``splits`` ranges each and no overhead."""
    each = ranges.round_up(device.item_blocks(gl.to_tensor(0), key_lengths, KEYS), GRANULARITY)
    item = number // splits
    split = number - item * splits
    begin = split * (each // GRANULARITY) // splits * GRANULARITY
    end = (split + 1) * (each // GRANULARITY) // splits * GRANULARITY
    return ranges.Range(item * each + begin, item * each + end, item, item + 1, item * each)


@gluon.jit
def write_metadata(scratch, work, CONFIG: gl.constexpr):
    """Write the split metadata for the combine kernel: which work item this range continues."""
    if CONFIG.balanced and not CONFIG.equal_splits:
        metadata = device.range_metadata(scratch, work.num_splits, work.num_groups, PARTIAL)
        gl.store(metadata + work.number, ranges.continued_item(work.range, CONFIG.overhead).to(gl.float32))


@gluon.jit
def split_of(item, cost, work, key_lengths, CONFIG: gl.constexpr):
    """The CTA's split of the work item that starts at ``cost``."""
    length = device.key_count(item, key_lengths)
    own = (length + KEYS - 1) // KEYS
    blocks = own
    extra_length = length
    if key_lengths.extra_limit is not None:
        extra_length = device.extra_key_count(item, key_lengths)
        blocks += (extra_length + KEYS - 1) // KEYS
    blocks = ranges.round_up(gl.maximum(blocks, 1), CONFIG.granularity)
    if CONFIG.balanced:
        begin, end = ranges.split_of(work.range, cost, blocks, CONFIG.overhead)
        return SparseDecodeSplit(begin, end, blocks, own, length, extra_length)
    else:
        return SparseDecodeSplit(blocks * 0, blocks, blocks, own, length, extra_length)


@gluon.jit
def has_split(item, cost, work, CONFIG: gl.constexpr):
    """Whether the CTA has a split of the work item that starts at ``cost``: a range may end within an item's
    overhead."""
    has = item < work.range.stop
    if CONFIG.balanced and not CONFIG.equal_splits:
        has = has & (work.range.end > cost + CONFIG.overhead)
    return has


@gluon.jit
def num_steps(split):
    """Number of steps of two blocks in a split; the last step may lack its second block."""
    return opaque((split.end - split.begin + 1) // 2)
