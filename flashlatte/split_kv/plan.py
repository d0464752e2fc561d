"""How many parts a call is cut into: settled on the host from shapes alone, never from lengths."""

from __future__ import annotations

import functools

# What a call may allocate beside its outputs, whatever the batch.
MAX_SCRATCH_BYTES = 64 << 20

# What the costs of all items may sum to, where parts are found in 32 bits (``gluon_parts``).
MOST_COST = 2**31 - 1

# Above so many items, several for every program, evening out their lengths is worth less than the scan costs.
_MAX_BALANCED_ITEMS = 16384

# Share of the programs that may idle for the sake of parts that split no item when all have one length.
_IDLE_FOR_WHOLE_ITEMS = 0.07


@functools.lru_cache(maxsize=4096)
def balanced_parts(
    items: int, groups: int, resident: int, item_blocks: int, record_bytes: int, *, uniform: bool = False
) -> int | None:
    """Parts for ``groups`` groups of ``items`` items; None for one program per item and group, without splits.

    Args:
        items: what has a key list of its own.
        groups: programs that each need all keys of an item (its head blocks).
        resident: programs that the device runs at once.
        item_blocks: the most blocks an item can have.
        record_bytes: scratch for one partial result of a group; each part of each group has two.
        uniform: whether all items have the same number of blocks, as far as the host can tell.
    """
    if 2 * groups > resident or items > _MAX_BALANCED_ITEMS:
        return None
    if uniform and _use(items * groups, resident) >= 1 - _IDLE_FOR_WHOLE_ITEMS:
        return None
    parts = _whole_items_each(items, resident // groups)
    return min(parts, items * item_blocks, MAX_SCRATCH_BYTES // (2 * groups * record_bytes)) or None


def _use(programs: int, resident: int) -> float:
    """Share of the device in use, on average, by programs that take equally long."""
    return programs / (-(-programs // resident) * resident)


def _whole_items_each(items: int, parts: int) -> int:
    """Fewer parts, if not many fewer, such that parts and items divide each other."""
    if parts >= items:
        each = parts // items
        power = 1 << (each.bit_length() - 1)
        # Merging takes splits by powers of two.
        fewer = power * items if power * items >= parts * (1 - _IDLE_FOR_WHOLE_ITEMS) else each * items
    else:
        fewer = -(-items // -(-items // parts))
    return fewer if fewer >= parts * (1 - _IDLE_FOR_WHOLE_ITEMS) else parts


@functools.lru_cache(maxsize=4096)
def fixed_groups(items: int, item_bytes: int) -> tuple[tuple[int, int], ...]:
    """(first item, items) of each launch, as few and as even as the partial results of a launch fit the scratch."""
    most = max(min(MAX_SCRATCH_BYTES // item_bytes, items), 1)
    launches = max(-(-items // most), 1)
    size = max(-(-items // launches), 1)
    return tuple((first, min(size, items - first)) for first in range(0, items, size))
