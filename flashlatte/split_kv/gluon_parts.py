"""``device.find_part`` for Gluon kernels, in 32-bit sums, and the note that a part leaves for who merges.

The partition is that of ``device``, which the combine kernel knows; only what scans vectors of lengths is written
again, since Gluon wants a layout where Triton infers one. All costs together must fit 32 bits (``plan.MOST_COST``),
which are half as long to sum.
"""

# Triton's calls are not Python's.
# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashlatte.split_kv import device


@gluon.constexpr_function
def _one_each(THREADS):
    return gl.BlockedLayout([1], [32], [THREADS // 32], [0])


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def whole_grains(blocks, GRAIN: gl.constexpr):
    """Blocks, rounded up to GRAIN."""
    return (blocks + GRAIN - 1) // GRAIN * GRAIN


@gluon.jit
def _item_costs(items, lists, BLOCK_N: gl.constexpr, OVERHEAD: gl.constexpr, GRAIN: gl.constexpr):
    blocks = whole_grains(device.item_blocks(items, lists, BLOCK_N), GRAIN)
    return gl.where(items < lists.num_items, blocks + OVERHEAD, 0)


@gluon.jit
def _parts_in_use(num_parts, total, OVERHEAD: gl.constexpr, GRAIN: gl.constexpr):
    return gl.minimum(num_parts, gl.maximum(total // (OVERHEAD + GRAIN), 1))


@gluon.jit
def _share_of(total, number, parts, GRAIN: gl.constexpr):
    """⌊number · total / parts⌋ in whole grains, for number ≤ parts, where the product may be too large."""
    grains = total // GRAIN
    whole = grains // parts
    return (number * whole + number * (grains - whole * parts) // parts) * GRAIN


@gluon.jit
def find_part_alike(number, num_parts, lists, BLOCK_N: gl.constexpr, OVERHEAD: gl.constexpr, GRAIN: gl.constexpr = 1):
    """``find_part`` where all items have the same lengths: nothing is read."""
    each = whole_grains(device.item_blocks(gl.to_tensor(0), lists, BLOCK_N), GRAIN) + OVERHEAD
    total = each * lists.num_items
    parts = _parts_in_use(num_parts, total, OVERHEAD, GRAIN)
    begin = _share_of(total, gl.minimum(number, parts), parts, GRAIN)
    end = _share_of(total, gl.minimum(number + 1, parts), parts, GRAIN)
    first = begin // each
    return device.Part(begin, end, first, (end + each - 1) // each, first * each)


@gluon.jit
def find_even_part(number, splits, lists, BLOCK_N: gl.constexpr, GRAIN: gl.constexpr = 1):
    """A part where all items have the same lengths and are split into ``splits`` parts each; starting costs nothing."""
    each = whole_grains(device.item_blocks(gl.to_tensor(0), lists, BLOCK_N), GRAIN)
    item = number // splits
    split = number - item * splits
    begin = split * (each // GRAIN) // splits * GRAIN
    end = (split + 1) * (each // GRAIN) // splits * GRAIN
    return device.Part(item * each + begin, item * each + end, item, item + 1, item * each)


@gluon.jit
def find_part(
    number,
    num_parts,
    lists,
    BLOCK_N: gl.constexpr,
    OVERHEAD: gl.constexpr,
    THREADS: gl.constexpr,
    GRAIN: gl.constexpr = 1,
):
    """The ``device.Part`` that is number ``number`` of ``num_parts``, found by all THREADS of a partition."""
    items = gl.arange(0, THREADS, _one_each(THREADS))
    costs = _item_costs(items, lists, BLOCK_N, OVERHEAD, GRAIN)
    total = gl.sum(costs, 0)
    for start in range(THREADS, lists.num_items, THREADS):
        total += gl.sum(_item_costs(start + items, lists, BLOCK_N, OVERHEAD, GRAIN), 0)
    parts = _parts_in_use(num_parts, total, OVERHEAD, GRAIN)
    begin = _share_of(total, gl.minimum(number, parts), parts, GRAIN)
    end = _share_of(total, gl.minimum(number + 1, parts), parts, GRAIN)

    first, stop, first_cost = _count(items, 0, costs, lists, begin, end)
    scanned = gl.to_tensor(0)
    for start in range(THREADS, lists.num_items, THREADS):
        scanned += gl.sum(costs, 0)
        costs = _item_costs(start + items, lists, BLOCK_N, OVERHEAD, GRAIN)
        before, begun, cost_before = _count(start + items, scanned, costs, lists, begin, end)
        first += before
        stop += begun
        first_cost += cost_before
    return device.Part(begin, end, first, stop, first_cost)


@gluon.jit
def _count(items, scanned, costs, lists, begin, end):
    """Of the items, how many end before ``begin``, how many begin before ``end``, and what the former cost."""
    item_end = scanned + gl.associative_scan(costs, 0, _add)
    is_before = (items < lists.num_items) & (item_end <= begin)
    is_begun = (items < lists.num_items) & (item_end - costs < end)
    # All in one sum: a reduction is what takes time here. No more than 1,024 threads count.
    sums = gl.sum(gl.where(is_before, (costs.to(gl.int64) << 24) + 1, 0) + gl.where(is_begun, 0x1000, 0), 0)
    return (sums & 0xFFF).to(gl.int32), (sums >> 12 & 0xFFF).to(gl.int32), (sums >> 24).to(gl.int32)


@gluon.jit
def note_continued(scratch, part, number, num_parts, num_groups, RECORD: gl.constexpr, OVERHEAD: gl.constexpr):
    """Tell the combine kernel which item a part continues (``device.continued_items``)."""
    continues = (part.first < part.stop) & (part.begin > part.first_cost + OVERHEAD)
    pointer = device.continued_items(scratch, num_parts, num_groups, RECORD) + number
    gl.store(pointer, gl.where(continues, part.first, -1).to(gl.float32))
