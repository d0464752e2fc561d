"""The number of CTAs and splits of a call, computed on the host from shapes alone, never from lengths.

``device`` defines the terms.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

from flashlatte.split_kv.device import SplitGrid

# Maximum scratch of a call, for any batch.
MAX_SCRATCH_BYTES = 64 << 20

# Maximum total cost of all work items, in units of ``item_blocks``: kernels add costs in 32 bits (``ranges``), and a
# unit has two blocks where a CTA processes blocks in pairs.
MAX_COST = 2**30 - 1
# The cost of starting a work item in a portable kernel, in keys.
_OVERHEAD_KEYS = 64
# Maximum cost of starting a work item, in blocks.
_MAX_OVERHEAD = 64

# Above this number of work items, several per CTA, balancing their lengths gains less than the scan costs.
_MAX_BALANCED_ITEMS = 16384

# Fraction of the CTAs that may idle in exchange for ranges that split no work item if all have the same length.
_IDLE_FOR_WHOLE_ITEMS = 0.07


class PartialShape(NamedTuple):
    """The shape of a partial output: float32 [rows, cols], and an lse per row."""

    rows: int
    cols: int

    @property
    def elements(self) -> int:
        return self.rows * (self.cols + 1)


@dataclass(frozen=True)
class SplitPlan:
    """The split of the work items of a call: balanced ranges, or fixed splits of each item (1: not split).

    Attributes:
        partial: shape of a partial output.
        groups: CTAs that process the same keys of a work item; ``groups_per_head`` of them per kv head.
        splits: number of balanced ranges, or maximum number of fixed splits of a work item of this call.
        split_blocks, max_splits: parameters of fixed splits (``device.fixed_splits``); None and 0 for balanced ranges.
        overhead: cost of starting a work item in a balanced range, in blocks.
        launches: (first work item, work items) of each launch.
        scratch: float32 elements for a launch's partial outputs and their metadata.
        combines: whether a work item can be split, so that a combine kernel is needed.
    """

    partial: PartialShape
    groups: int
    groups_per_head: int
    splits: int
    split_blocks: int | None
    max_splits: int
    overhead: int
    launches: tuple[tuple[int, int], ...]
    scratch: int
    combines: bool

    def grid(self, first_item: int) -> SplitGrid:
        """The numbering of the CTAs of the launch that begins at work item ``first_item``."""
        return SplitGrid(self.groups, self.groups_per_head, self.splits, first_item)

    def ctas(self, items: int) -> int:
        """The number of CTAs of a launch over ``items`` work items."""
        return self.groups * self.splits * (1 if self.split_blocks is None else items)


def balanced(
    partial: PartialShape, items: int, item_blocks: int, groups: int, groups_per_head: int, ranges: int, overhead: int
) -> SplitPlan:
    """A plan with ``ranges`` ranges of equal cost, from ``num_ranges``."""
    assert overhead <= _MAX_OVERHEAD, overhead
    return SplitPlan(
        partial,
        groups,
        groups_per_head,
        splits=ranges,
        split_blocks=None,
        max_splits=0,
        overhead=overhead,
        launches=((0, items),),
        # Two partial outputs per range and group; the continued work item per range.
        scratch=2 * groups * ranges * partial.elements + ranges,
        combines=ranges > 1 and item_blocks > 1,
    )


def fixed(
    partial: PartialShape,
    items: int,
    item_blocks: int,
    groups: int,
    groups_per_head: int,
    split_blocks: int,
    max_splits: int,
) -> SplitPlan:
    """A plan with splits of ``split_blocks`` blocks, at most ``max_splits`` per item; results do not depend on the
    batch."""
    splits = min(max_splits, max(-(-item_blocks // split_blocks), 1))
    # A partial output per split and group; the number of splits per work item.
    elements = groups * splits * partial.elements + 1 if splits > 1 else 0
    launches = fixed_launches(items, 4 * elements)
    return SplitPlan(
        partial,
        groups,
        groups_per_head,
        splits,
        split_blocks,
        max_splits,
        overhead=0,
        launches=launches,
        # At least 1: a kernel compiled without scratch might round differently.
        scratch=max(elements * max((count for _, count in launches), default=0), 1),
        combines=splits > 1,
    )


def whole(partial: PartialShape, items: int, groups: int, groups_per_head: int) -> SplitPlan:
    """A plan with one CTA per work item and group: splits that are longer than any work item."""
    return replace(
        fixed(partial, items, 1, groups, groups_per_head, 1, 1), scratch=0, launches=((0, items),) if items else ()
    )


def balanced_or_whole(
    partial: PartialShape,
    items: int,
    item_blocks: int,
    groups: int,
    groups_per_head: int,
    resident: int,
    block_n: int,
    *,
    uniform: bool = False,
) -> SplitPlan:
    """A balanced plan for blocks of ``block_n`` keys, or whole work items if ``num_ranges`` is None."""
    ranges = num_ranges(items, groups, resident, item_blocks, partial, uniform=uniform)
    if ranges is None:
        return whole(partial, items, groups, groups_per_head)
    return balanced(partial, items, item_blocks, groups, groups_per_head, ranges, -(-_OVERHEAD_KEYS // block_n))


@functools.lru_cache(maxsize=4096)
def num_ranges(
    items: int,
    groups: int,
    resident: int,
    item_blocks: int,
    partial: PartialShape,
    *,
    uniform: bool = False,
    keep_items_whole: bool = True,
) -> int | None:
    """The number of balanced ranges for ``groups`` groups of ``items`` work items; None to process whole work items.

    Args:
        resident: CTAs that are resident on the device.
        item_blocks: maximum number of blocks of a work item.
        uniform: whether all work items have the same number of blocks, as far as the host knows.
        keep_items_whole: use slightly fewer ranges than CTAs if work items of equal length are then not split.
    """
    if 2 * groups > resident or items > _MAX_BALANCED_ITEMS:
        return None
    # items + 1: a range may advance past the last work item.
    if (items + 1) * (item_blocks + _MAX_OVERHEAD) > MAX_COST:
        return None
    if uniform and _utilization(items * groups, resident) >= 1 - _IDLE_FOR_WHOLE_ITEMS:
        return None
    ranges = resident // groups
    if keep_items_whole:
        ranges = _whole_items_each(items, ranges)
    # A range needs two partial outputs per group, and one element of metadata.
    max_ranges = MAX_SCRATCH_BYTES // (4 * (2 * groups * partial.elements + 1))
    return min(ranges, items * item_blocks, max_ranges) or None


def _utilization(ctas: int, resident: int) -> float:
    """Average fraction of the device in use, for CTAs of equal duration."""
    return ctas / (-(-ctas // resident) * resident)


def _whole_items_each(items: int, ranges: int) -> int:
    """Slightly fewer ranges, such that the number of ranges or of work items divides the other; ``ranges`` if that
    needs many fewer."""
    if ranges >= items:
        each = ranges // items
        power = 1 << (each.bit_length() - 1)
        # The combine kernel processes splits in powers of two.
        fewer = power * items if power * items >= ranges * (1 - _IDLE_FOR_WHOLE_ITEMS) else each * items
    else:
        fewer = -(-items // -(-items // ranges))
    return fewer if fewer >= ranges * (1 - _IDLE_FOR_WHOLE_ITEMS) else ranges


@functools.lru_cache(maxsize=4096)
def fixed_launches(items: int, item_bytes: int) -> tuple[tuple[int, int], ...]:
    """(first item, items) of each launch: as few launches as the scratch permits, of even size."""
    max_ranges = max(min(MAX_SCRATCH_BYTES // max(item_bytes, 1), items), 1)
    launches = max(-(-items // max_ranges), 1)
    size = max(-(-items // launches), 1)
    return tuple((first, min(size, items - first)) for first in range(0, items, size))
