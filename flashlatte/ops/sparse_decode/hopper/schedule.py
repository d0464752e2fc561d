"""Which blocks of which work items a CTA takes: ``split_kv.device``, as this kernel needs it.

A work item is a query token of a request; its blocks are those of its own list of 64 indices each, and after them those
of its list into the extra cache.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.mla_tiles import KEYS
from flashlatte.kernels.hopper.ptx.registers import opaque
from flashlatte.split_kv import device
from flashlatte.split_kv.gluon import PARTIAL, find_range, round_up


class Work(NamedTuple):
    """What a CTA works on.

    Attributes:
        range: its work items and costs (``device.Range``).
        stride: from item to item.
        number: of the range.
        num_splits: balanced ranges, or splits of a work item.
        group: number of its 64 heads among those of a work item.
        num_groups: groups of a work item.
    """

    range: Any
    stride: Any
    number: Any
    num_splits: Any
    group: Any
    num_groups: Any


class Plan(NamedTuple):
    """What is settled when the kernel is compiled.

    Attributes:
        format: ``tiles.PLAIN``, ``V32``, ``MODEL1`` or ``V41``.
        producer_threads: of the producer, with which the kernel begins.
        has_rope: whether rows have 64 columns more than the 512 of a value.
        alignment: bytes that the addresses of tokens in the caches are multiples of, 16 at most.
        flat: whether tokens follow each other at one distance, over all pages. Less code, which wins "v32, b 2" by a
            third (21.7 instead of 31.8 µs; docs/notes/sparse-decode.md).
        out_align: numbers that the strides of ``out`` are units of: 8 where its rows begin at multiples of 16 bytes,
            else 1.
        balanced: whether CTAs take ranges of equal cost; else whole work items.
        equal_splits: whether each work item has as many splits as any other; ``num_splits`` are then those of one.
        overhead: what starting on a work item costs, in blocks.
        granularity: blocks that a CTA takes at a time: two, or one where each split is one block (``one_block``).
        cluster: whether CTAs of neighbouring groups exchange what they dequantize (``clusters``).
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


class Split(NamedTuple):
    """What a CTA has of a work item.

    Attributes:
        begin, end: blocks, end exclusive.
        blocks: of the work item; ``own`` of them are of its own list.
        length, extra_length: of its lists.
    """

    begin: Any
    end: Any
    blocks: Any
    own: Any
    length: Any
    extra_length: Any


@gluon.jit
def find_work(key_lengths, num_splits, num_groups, PLAN: gl.constexpr):
    """The work of this CTA. Those of one range are neighbours, so that the L2 cache serves all but the first."""
    cta = gl.program_id(0)
    group = cta % num_groups
    number = cta // num_groups
    if PLAN.balanced:
        if PLAN.equal_splits:
            cta_range = _find_equal_range(number, num_splits, key_lengths, PLAN.granularity)
        else:
            cta_range = find_range(number, num_splits, key_lengths, KEYS, PLAN.overhead, PLAN.granularity)
        return Work(cta_range, 1, number, num_splits, group, num_groups)
    else:
        nothing = gl.to_tensor(0)
        cta_range = device.Range(nothing, nothing, number, key_lengths.num_items, nothing)
        return Work(cta_range, gl.num_programs(0) // num_groups, number, num_splits, group, num_groups)


@gluon.jit
def _find_equal_range(number, splits, key_lengths, GRANULARITY: gl.constexpr):
    """A range where all work items are of one length and have ``splits`` ranges each, without any overhead."""
    each = round_up(device.item_blocks(gl.to_tensor(0), key_lengths, KEYS), GRANULARITY)
    item = number // splits
    split = number - item * splits
    begin = split * (each // GRANULARITY) // splits * GRANULARITY
    end = (split + 1) * (each // GRANULARITY) // splits * GRANULARITY
    return device.Range(item * each + begin, item * each + end, item, item + 1, item * each)


@gluon.jit
def write_metadata(scratch, work, PLAN: gl.constexpr):
    """Tell the combine kernel which work item this range continues, unless it knows."""
    if PLAN.balanced and not PLAN.equal_splits:
        metadata = device.range_metadata(scratch, work.num_splits, work.num_groups, PARTIAL)
        gl.store(metadata + work.number, device.continued_item(work.range, PLAN.overhead).to(gl.float32))


@gluon.jit
def split_of(item, cost, work, key_lengths, PLAN: gl.constexpr):
    """The CTA's split of a work item that starts at ``cost``."""
    length = device.key_count(item, key_lengths)
    own = (length + KEYS - 1) // KEYS
    blocks = own
    extra_length = length
    if key_lengths.extra_limit is not None:
        extra_length = device.extra_key_count(item, key_lengths)
        blocks += (extra_length + KEYS - 1) // KEYS
    blocks = round_up(gl.maximum(blocks, 1), PLAN.granularity)
    if PLAN.balanced:
        begin, end = device.split_of(work.range, cost, blocks, PLAN.overhead)
        return Split(begin, end, blocks, own, length, extra_length)
    else:
        return Split(blocks * 0, blocks, blocks, own, length, extra_length)


@gluon.jit
def has_split(item, cost, work, PLAN: gl.constexpr):
    """Whether the CTA has any of a work item that starts at ``cost``: a range may end within an item's overhead."""
    has = item < work.range.stop
    if PLAN.balanced and not PLAN.equal_splits:
        has = has & (work.range.end > cost + PLAN.overhead)
    return has


@gluon.jit
def num_steps(split):
    """Steps of two blocks that cover a split; the last may lack its second block."""
    return opaque((split.end - split.begin + 1) // 2)
