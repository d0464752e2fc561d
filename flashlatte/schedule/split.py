"""FlashMLA's split schedule: which blocks of which requests each part of the GPU takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flashlatte import checks

COLUMNS = (
    "begin_req",
    "end_req",
    "begin_block",
    "end_block",
    "begin_split_idx",
    "is_first_req_splitted",
    "is_last_req_splitted",
    "pad",
)


@dataclass(frozen=True)
class SplitSchedule:
    """A schedule of ``num_parts`` parts over b requests.

    Attributes:
        tile_scheduler_metadata: int32 [num_parts, 8], columns ``COLUMNS``: a part takes the requests begin_req
            to end_req (inclusive), from block begin_block of the first to block end_block (exclusive) of the
            last; its share of begin_req is split number begin_split_idx of that request; the flags say whether
            its first and last request are shared with other parts. A part without work has begin_req = b.
        num_splits: int32 [b + 1], the exclusive prefix sum of the splits of each request.
        payload: cost that a part takes at most, in blocks.
    """

    tile_scheduler_metadata: torch.Tensor
    num_splits: torch.Tensor
    payload: int


def split_schedule(
    lengths: Sequence[int] | torch.Tensor, num_parts: int, *, block_size: int = 64, overhead: int = 5
) -> SplitSchedule:
    """Split requests of these lengths over ``num_parts`` parts of about equal cost.

    A request costs its blocks plus ``overhead`` blocks for every part that works on it; an empty request has one
    block. Each part takes requests in order until its payload, ⌈Σ(blocks + overhead) / num_parts⌉ + overhead, is
    used up, and may leave the last one to be finished by the next part.

    Args:
        lengths: keys of each request, at least one request; values below 0 count as 0.
        num_parts: parts of the GPU, at least 1.
        block_size: keys in a block.
        overhead: what starting on a request costs, in blocks.

    Raises:
        TypeError, ValueError: no requests, or a count or size below 1 (overhead: below 0).
    """
    num_parts = checks.positive_int("num_parts", num_parts)
    block_size = checks.positive_int("block_size", block_size)
    if isinstance(overhead, bool) or not isinstance(overhead, int) or overhead < 0:
        raise ValueError(f"overhead must be an int of at least 0, got {overhead!r}")
    key_counts = [max(int(n), 0) for n in lengths]
    if not key_counts:
        raise ValueError("lengths must hold at least one request, got none")
    requests = len(key_counts)
    blocks = [max(-(-n // block_size), 1) for n in key_counts]
    payload = -(-sum(count + overhead for count in blocks) // num_parts) + overhead

    parts: list[list[int]] = []
    num_splits = [0]
    request, block, split = 0, 0, 0
    for _ in range(num_parts):
        begin = (request, block, split)
        remaining = payload
        while request < requests:
            rest = blocks[request] - block + overhead
            if remaining >= rest:
                remaining -= rest
                num_splits.append(num_splits[-1] + split + 1)
                request, block, split = request + 1, 0, 0
                continue
            if remaining > overhead:
                block += remaining - overhead
                split += 1
            break
        parts.append(_part(begin, (request, block), blocks, key_counts))
    return SplitSchedule(torch.tensor(parts, dtype=torch.int32), torch.tensor(num_splits, dtype=torch.int32), payload)


def _part(begin: tuple[int, int, int], end: tuple[int, int], blocks: list[int], key_counts: list[int]) -> list[int]:
    begin_req, begin_block, begin_split = begin
    if begin_req == len(blocks):
        return [begin_req, begin_req - 1, 0, 0, 0, 0, 0, 0]
    end_req, end_block = end
    if end_block == 0:
        end_req -= 1
        end_block = blocks[end_req] if key_counts[end_req] else 0
        last_splitted = False
    else:
        last_splitted = True
    first_splitted = begin_block != 0
    if begin_req == end_req:
        first_splitted = last_splitted = first_splitted or last_splitted
    return [
        begin_req,
        end_req,
        begin_block,
        end_block,
        begin_split,
        int(first_splitted),
        int(last_splitted),
        0,
    ]
