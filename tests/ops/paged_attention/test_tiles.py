"""The tiles of queries in the slots of a call, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from flashlatte.kernels.triton.ragged_tiles import tile_slots
from flashlatte.kernels.triton.rows import Window
from flashlatte.ops.paged_attention.portable.tiles import TILE_NUMBERS, VisibleRanges, find_tiles_kernel
from flashlatte.ops.paged_attention.reference import PagedAttentionRequests

pytestmark = pytest.mark.interpreter
BLOCK = 3
BOUNDARIES = {
    "decodes": [0, 1, 2, 3, 4, 5],
    "a few tokens each": [0, 3, 4, 8, 8, 14],
    "none of the first, tokens of nobody": [2, 2, 3, 9],
    "one request": [0, 7],
    "out of order and beyond": [4, 2, 6, 40],
    "many": list(range(0, 150, 2)),
}


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("name", BOUNDARIES)
def test_each_token_has_one_tile_of_its_request(name: str, by_token: bool):
    boundaries = BOUNDARIES[name]
    total, requests = min(max(boundaries), 16) if len(boundaries) < 10 else 150, len(boundaries) - 1
    slots = total if by_token else tile_slots(total, requests, BLOCK)
    tiles = torch.full((slots, TILE_NUMBERS), -7, dtype=torch.int32)
    lengths = torch.full((slots,), -7, dtype=torch.int32)
    keys = torch.arange(10, 10 + requests, dtype=torch.int32)
    find_tiles_kernel[(slots,)](
        PagedAttentionRequests(torch.tensor(boundaries), requests, total, keys, seqused_stride=1, capacity=1000),
        VisibleRanges(Window(left=2**31 - 1, right=0), None, 0, 0, 0),
        tiles=tiles,
        lengths=lengths,
        max_queries=0,
        TILES_EACH=0,
        BY_TOKEN=by_token,
        HAS_NEW=False,
        BLOCK_TOKENS=BLOCK,
        BLOCK_N=16,
    )
    assert (lengths >= 0).all()
    ends = [0, *(max(min(max(boundaries[: i + 1]), total), 0) for i in range(requests + 1)), total]
    of_token = [i for i in range(requests + 2) for _ in range(ends[i], ends[i + 1])]  # stretch
    seen = []
    for first, tokens, own, _, request, *_ in tiles.tolist():
        stretches = of_token[first : first + tokens]
        seen += range(first, first + tokens)
        assert 0 <= tokens <= BLOCK
        assert len(set(stretches)) <= 1
        if tokens:
            assert first - own == ends[stretches[0]]
        if tokens and 0 < stretches[0] <= requests:
            assert request == stretches[0] - 1
    assert sorted(seen) == list(range(total))
