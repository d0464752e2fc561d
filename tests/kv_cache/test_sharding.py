"""Sharding of tokens over ranks, compared with tokens distributed one by one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashlatte.kv_cache.sharding import Sharding, as_sharding

shardings = st.tuples(st.integers(1, 5), st.sampled_from([1, 2, 3, 8, 64])).flatmap(
    lambda drawn: st.builds(Sharding, st.integers(0, drawn[0] - 1), st.just(drawn[0]), st.just(drawn[1]))
)
DTYPES = st.sampled_from([torch.int32, torch.int64])


def dealt(length: int, size: int, interleave: int) -> list[list[int]]:
    """Each rank's tokens of a request, in order."""
    hands: list[list[int]] = [[] for _ in range(size)]
    rank = 0
    for token in range(length):
        if token and token % interleave == 0:
            rank = (rank + 1) % size
        hands[rank].append(token)
    return hands


@given(sharding=shardings, length=st.integers(0, 700), dtype=DTYPES)
def test_local_and_global_positions(sharding, length, dtype):
    mine = torch.tensor(dealt(length, sharding.size, sharding.interleave)[sharding.rank], dtype=dtype)
    positions = torch.arange(length, dtype=dtype)
    local = sharding.local_positions(positions)
    assert local.dtype == dtype
    assert positions[sharding.owns(positions)].equal(mine)
    assert local[local >= 0].equal(torch.arange(len(mine), dtype=dtype))
    assert sharding.global_positions(torch.arange(len(mine), dtype=dtype)).equal(mine)


@given(sharding=shardings, dtype=DTYPES)
def test_lengths(sharding, dtype):
    hands = [dealt(length, sharding.size, sharding.interleave) for length in range(0, 400, 7)]
    lengths = sharding.local_lengths(torch.arange(0, 400, 7, dtype=dtype))
    assert lengths.dtype == dtype
    assert lengths.tolist() == [len(hand[sharding.rank]) for hand in hands]


def test_negative_positions_belong_to_no_rank():
    sharding, below = Sharding(1, 2, 3), torch.tensor([-1, -2, -7, -(2**31)], dtype=torch.int32)
    assert sharding.owns(below).tolist() == [False] * 4
    assert sharding.local_lengths(below).tolist() == [0] * 4
    for numbers in (sharding.local_positions(below), sharding.global_positions(below), sharding.local_slots(below, 6)):
        assert numbers.tolist() == [-1] * 4


@given(sharding=shardings, turns=st.integers(1, 4), pages=st.permutations(range(6)), columns=st.integers(0, 6))
def test_slots_agree_with_the_block_tables(sharding, turns, pages, columns):
    """Token t, written by its slot, is found through the rank's table at its local position."""
    page_tokens = sharding.size * sharding.interleave * turns
    held = page_tokens // sharding.size
    table = torch.tensor([pages[:columns]], dtype=torch.int64)
    length = columns * page_tokens
    tokens = torch.arange(length)
    slots = table[0, tokens // page_tokens] * page_tokens + tokens % page_tokens

    local_slots = sharding.local_slots(slots, page_tokens)
    mine = torch.tensor(dealt(length, sharding.size, sharding.interleave)[sharding.rank], dtype=torch.int64)
    assert (local_slots >= 0).nonzero().flatten().equal(mine)
    for page_size in (held, turns, 1):
        local_table = sharding.local_block_table(table, page_tokens, page_size)
        local = torch.arange(len(mine))
        assert local_slots[mine].equal(local_table[0, local // page_size] * page_size + local % page_size)


def test_negative_pages_stay_negative():
    table = torch.tensor([[3, -1, -5]], dtype=torch.int32)
    assert Sharding(0, 2, 1).local_block_table(table, 16, 4).tolist() == [[6, 7, -1, -1, -1, -1]]
    assert Sharding(0, 2, 1).local_block_table(table, 16, 8) is table


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_page_numbers_that_overflow_become_minus_1(dtype):
    largest = torch.iinfo(dtype).max
    table = torch.tensor([[largest, largest // 2 + 1, largest // 2]], dtype=dtype)
    local = Sharding(0, 2, 1).local_block_table(table, 16, 4)
    assert local.tolist() == [[-1, -1, -1, -1, largest - 1, largest]]


def test_errors():
    sharding = Sharding(0, 2, 8)
    with pytest.raises(ValueError, match=r"page_tokens must be a multiple of 16, .* got 24"):
        sharding.local_slots(torch.zeros(1, dtype=torch.int32), 24)
    with pytest.raises(ValueError, match=r"page_size must divide the 32 tokens that a rank holds .* got 5"):
        sharding.local_block_table(torch.zeros(1, 1, dtype=torch.int32), 64, 5)
    with pytest.raises(TypeError, match="sharding must be \\(rank, size, interleave\\), got 3"):
        as_sharding(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sharding's rank must be below its size 2, got 2"):
        as_sharding((2, 2, 1))
