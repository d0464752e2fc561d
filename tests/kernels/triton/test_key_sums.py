"""Deterministic sums by key, in Triton's interpreter."""

import pytest
import torch

from flashlatte.kernels.triton.key_sums import KeySums, pieces

pytestmark = pytest.mark.interpreter

WIDTH = 40


@pytest.mark.parametrize(("s_kv", "scratch_rows"), [(3, 1000), (3, 36), (3, 7), (200, 1000)])
def test_rows_of_a_key_are_added_in_order(s_kv, scratch_rows):
    """Bitwise equal to a sum in float32, one row after the other, also in pieces of whole tokens or of some slots."""
    rng = torch.Generator().manual_seed(0)
    s_q, topk = 5, 18
    indices = torch.randint(-1, s_kv + 1, (s_q, 1, topk), generator=rng, dtype=torch.int32)
    lengths = torch.tensor([18, 0, 7, 25, 18], dtype=torch.int32)
    contributions = torch.randn(s_q, topk, WIDTH, generator=rng)
    valid = (indices[:, 0] >= 0) & (indices[:, 0] < s_kv) & (torch.arange(topk) < lengths[:, None])
    contributions[~valid] = torch.nan
    total = torch.randn(s_kv, WIDTH, generator=rng)

    expected = total.clone()
    key_sums = KeySums(indices, lengths, total)
    for first_token, tokens, first_slot, slots in pieces(s_q, topk, 1, scratch_rows):
        piece = slice(first_token, first_token + tokens), slice(first_slot, first_slot + slots)
        key_sums.add(contributions[piece].flatten(0, 1), first_token, tokens, first_slot, slots)
        for keys, rows, counts in zip(indices[:, 0][piece], contributions[piece], valid[piece], strict=True):
            for key, row in zip(keys[counts].tolist(), rows[counts], strict=True):
                expected[key] += row
    assert total.equal(expected)
