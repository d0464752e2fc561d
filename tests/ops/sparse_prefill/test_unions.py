"""The union kernel in Triton's interpreter, compared with Python sets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashlatte.ops.sparse_prefill.hopper import unions
from flashlatte.ops.sparse_prefill.hopper.unions import MEMBER_BITS, MEMBERS, PER_WORD, build_unions

pytestmark = pytest.mark.interpreter

NONE = (-1, -(2**31), 2**31 - 1)


def selections(indices, lengths, s_kv, group):
    """Per group: pairs of a position and the member that selected it."""
    found = [[] for _ in range(-(-len(indices) // group))]
    for token, row in enumerate(indices[:, 0].tolist()):
        length = len(row) if lengths is None else max(int(lengths[token]), 0)
        found[token // group] += [(index, token % group) for index in row[:length] if 0 <= index < s_kv]
    return found


def listed(union):
    """Per group: pairs of a position and its members."""
    return [
        [(entry >> MEMBER_BITS.value, entry & MEMBERS.value) for entry in entries[:count].tolist() if entry >= 0]
        for entries, count in zip(union.entries, union.counts.tolist(), strict=True)
    ]


def check(indices, lengths, s_kv, group):
    union = build_unions(indices, lengths, s_kv, group)
    assert not union.damaged.any()
    assert (union.counts <= group * indices.shape[-1]).all()
    for entries, selected in zip(listed(union), selections(indices, lengths, s_kv, group), strict=True):
        assert sorted((p, m) for p, members in entries for m in range(group) if members >> m & 1) == sorted(selected)
        if len(set(selected)) == len(selected):
            assert [position for position, _ in entries] == sorted({position for position, _ in selected})
    return union


@given(
    group=st.sampled_from([2, 4]),
    s_q=st.integers(1, 9),
    topk=st.integers(1, 60),
    s_kv=st.sampled_from([1, 50, 90, 5000]),
    with_lengths=st.booleans(),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 2**20),
)
def test_every_selection_is_listed_once(group, s_q, topk, s_kv, with_lengths, dtype, seed):
    rng = torch.Generator().manual_seed(seed)
    wide = max(s_kv, topk)
    indices = torch.stack([torch.randperm(wide, generator=rng)[:topk] for _ in range(s_q)]).unsqueeze(1)
    nothing = torch.tensor(NONE)[torch.randint(3, indices.shape, generator=rng)]
    indices = torch.where(torch.rand(indices.shape, generator=rng) < 0.2, nothing, indices).to(dtype)
    lengths = torch.randint(-3, topk + 9, (s_q,), generator=rng).to(dtype) if with_lengths else None
    check(indices, lengths, s_kv, group)


@pytest.mark.parametrize("group", [4, pytest.param(2, marks=pytest.mark.full)])
def test_positions_of_several_windows(group, monkeypatch):
    monkeypatch.setattr(unions, "WORDS", 40)
    monkeypatch.setattr(unions, "BLOCK", 32)
    window = 40 * PER_WORD.value
    s_kv = 2 * window + 11
    edges = [0, 7, window - 1, window, 2 * window - 1, 2 * window, s_kv - 1, s_kv, s_kv + window, -1]
    rng = torch.Generator().manual_seed(0)
    indices = torch.stack([torch.tensor(edges)[torch.randperm(10, generator=rng)] for _ in range(5)]).unsqueeze(1)
    union = check(indices.int(), None, s_kv, group)
    assert listed(union)[0] == [(position, (1 << group) - 1) for position in edges[:7]]


def test_a_token_selected_twice_counts_twice():
    indices = torch.tensor([[3, 5, 3, -1], [5, 6, 7, 8], [0, 1, 2, 3], [3, 2, 1, 0]], dtype=torch.int32).unsqueeze(1)
    union = check(indices, torch.tensor([4, 2, 4, 4]), 9, 2)
    # Nothing is listed twice in the second group: its tokens share what they select.
    assert listed(union)[1] == [(position, 3) for position in range(4)]


def test_selections_beyond_a_block():
    rng = torch.Generator().manual_seed(1)
    indices = torch.stack([torch.randperm(3000, generator=rng)[:1100] for _ in range(2)]).int().unsqueeze(1)
    check(indices, None, 2900, 2)
    indices[1, 0, 1050] = indices[1, 0, 2]
    check(indices, torch.tensor([1000, 1090]), 2900, 2)


def test_indices_with_gaps_between_rows():
    wide = torch.arange(40, dtype=torch.int32).view(4, 1, 10)
    check(wide[..., :7], None, 35, 4)
