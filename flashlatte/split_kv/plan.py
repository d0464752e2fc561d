"""Over how many CTAs a call is split: settled on the host from shapes alone, never from lengths.

``device`` explains the words.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

# What a call may allocate beside its outputs, whatever the batch.
MAX_SCRATCH_BYTES = 64 << 20

# What the costs of all work items may sum to, where ranges are found in 32 bits (``gluon``).
MAX_COST = 2**31 - 1

# Above so many work items, several for every CTA, evening out their lengths is worth less than the scan costs.
_MAX_BALANCED_ITEMS = 16384

# Share of the CTAs that may idle for the sake of ranges that split no work item when all have one length.
_IDLE_FOR_WHOLE_ITEMS = 0.07


class Partial(NamedTuple):
    """A partial output: float32 [rows, cols], and an lse for each row."""

    rows: int
    cols: int

    @property
    def numbers(self) -> int:
        return self.rows * (self.cols + 1)


@dataclass(frozen=True)
class SplitPlan:
    """How the work items of a call are split: into balanced ranges, or each into fixed splits (1: not at all).

    Attributes:
        partial: what a CTA leaves that has not all of a work item.
        groups: CTAs that need all keys of a work item; ``groups_per_head`` of them for each kv head.
        splits: balanced ranges, or the most fixed splits that a work item of this call can have.
        split_blocks, max_splits: of fixed splits (``device.fixed_splits``); None, 0 for balanced ranges.
        overhead: what starting on a work item costs a balanced range, in blocks.
        launches: (first work item, work items) of each launch.
        scratch: float32 numbers for a launch's partial outputs and their metadata.
        combines: whether any work item can be split, and its partial outputs be combined in a kernel of their own.
    """

    partial: Partial
    groups: int
    groups_per_head: int
    splits: int
    split_blocks: int | None
    max_splits: int
    overhead: int
    launches: tuple[tuple[int, int], ...]
    scratch: int
    combines: bool

    def ctas(self, items: int) -> int:
        """CTAs of a launch over so many work items."""
        return self.groups * self.splits * (1 if self.split_blocks is None else items)


def balanced(
    partial: Partial, items: int, item_blocks: int, groups: int, groups_per_head: int, ranges: int, overhead: int
) -> SplitPlan:
    """Ranges of equal cost, from ``num_ranges``."""
    return SplitPlan(
        partial,
        groups,
        groups_per_head,
        splits=ranges,
        split_blocks=None,
        max_splits=0,
        overhead=overhead,
        launches=((0, items),),
        # Of each range and group two partial outputs; of each range what it continues.
        scratch=2 * groups * ranges * partial.numbers + ranges,
        combines=ranges > 1 and item_blocks > 1,
    )


def fixed(
    partial: Partial,
    items: int,
    item_blocks: int,
    groups: int,
    groups_per_head: int,
    split_blocks: int,
    max_splits: int,
) -> SplitPlan:
    """Splits of ``split_blocks`` blocks, for results that do not depend on the batch; ``max_splits`` of an item."""
    splits = min(max_splits, max(-(-item_blocks // split_blocks), 1))
    # Of each split and group a partial output; of each work item how many splits it has.
    numbers = groups * splits * partial.numbers + 1 if splits > 1 else 0
    launches = fixed_launches(items, 4 * numbers)
    return SplitPlan(
        partial,
        groups,
        groups_per_head,
        splits,
        split_blocks,
        max_splits,
        overhead=0,
        launches=launches,
        # Never none: a kernel compiled without scratch might round otherwise.
        scratch=max(numbers * max((count for _, count in launches), default=0), 1),
        combines=splits > 1,
    )


def whole(partial: Partial, items: int, groups: int, groups_per_head: int) -> SplitPlan:
    """A CTA for each work item and group, which are splits longer than any work item."""
    return replace(fixed(partial, items, 1, groups, groups_per_head, 1, 1), scratch=0)


@functools.lru_cache(maxsize=4096)
def num_ranges(
    items: int,
    groups: int,
    resident: int,
    item_blocks: int,
    partial: Partial,
    *,
    uniform: bool = False,
    of_equals: bool = True,
) -> int | None:
    """Balanced ranges for ``groups`` groups of ``items`` work items; None for whole work items.

    Args:
        resident: CTAs that the device runs at once.
        item_blocks: the most blocks a work item can have.
        uniform: whether all work items have the same number of blocks, as far as the host can tell.
        of_equals: rather somewhat fewer ranges, that split none of equally long work items, than one for every CTA.
    """
    if 2 * groups > resident or items > _MAX_BALANCED_ITEMS:
        return None
    if uniform and _use(items * groups, resident) >= 1 - _IDLE_FOR_WHOLE_ITEMS:
        return None
    ranges = resident // groups
    if of_equals:
        ranges = _whole_items_each(items, ranges)
    # A range has two partial outputs of each group, and a number of metadata.
    most = MAX_SCRATCH_BYTES // (4 * (2 * groups * partial.numbers + 1))
    return min(ranges, items * item_blocks, most) or None


def _use(ctas: int, resident: int) -> float:
    """Share of the device in use, on average, by CTAs that take equally long."""
    return ctas / (-(-ctas // resident) * resident)


def _whole_items_each(items: int, ranges: int) -> int:
    """Fewer ranges, if not many fewer, such that ranges and work items divide each other."""
    if ranges >= items:
        each = ranges // items
        power = 1 << (each.bit_length() - 1)
        # Combining takes splits by powers of two.
        fewer = power * items if power * items >= ranges * (1 - _IDLE_FOR_WHOLE_ITEMS) else each * items
    else:
        fewer = -(-items // -(-items // ranges))
    return fewer if fewer >= ranges * (1 - _IDLE_FOR_WHOLE_ITEMS) else ranges


@functools.lru_cache(maxsize=4096)
def fixed_launches(items: int, item_bytes: int) -> tuple[tuple[int, int], ...]:
    """(first item, items) of each launch, as few and as even as the partial outputs of a launch fit the scratch."""
    most = max(min(MAX_SCRATCH_BYTES // max(item_bytes, 1), items), 1)
    launches = max(-(-items // most), 1)
    size = max(-(-items // launches), 1)
    return tuple((first, min(size, items - first)) for first in range(0, items, size))
