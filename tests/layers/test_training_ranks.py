"""Attention of one rank's blocks compared with that of the whole batch."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashlatte.distributed.training import _blocks
from flashlatte.layers.training import TrainingBatch
from flashlatte.layers.training_ranks import attend_blocks
from flashlatte.ops.dense_prefill import dense_prefill


@given(
    before=st.integers(0, 3),
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    after=st.integers(0, 3),
    size=st.integers(1, 4),
    zigzag=st.booleans(),
)
def test_blocks_of_ranks_are_the_batch(before, lengths, after, size, zigzag):
    """Also with empty sequences, and tokens outside of every sequence, which hold NaN. A rank may have empty blocks."""
    boundaries = torch.tensor(list(accumulate([before, *lengths])), dtype=torch.int32)
    tokens = int(boundaries[-1]) + after
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(tokens, 2, 5, generator=generator, dtype=torch.float64) for _ in range(3))
    owned = torch.zeros(tokens, dtype=torch.bool)
    owned[before : int(boundaries[-1])] = True
    q, k, v = inputs = [torch.where(owned[:, None, None], x, torch.nan).requires_grad_() for x in (q, k, v)]
    longest = max(lengths)

    def gradients(out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
        return torch.autograd.grad((out * weights).sum(), inputs)

    whole = dense_prefill(q, k, v, boundaries, boundaries, longest, longest, softmax_scale=0.4, causal=True)
    rows, outs, lses = [], [], []
    for rank in range(size):
        blocks = _blocks(tokens, rank, size, zigzag)
        mine = torch.cat([torch.arange(block.start, block.stop) for block in blocks])
        out, lse = attend_blocks(q[mine], k, v, blocks, boundaries, longest, 0.4)
        rows, outs, lses = [*rows, mine], [*outs, out], [*lses, lse]
    order = torch.cat(rows).argsort()
    out, lse = torch.cat(outs)[order], torch.cat(lses)[order]
    torch.testing.assert_close(out, whole[0])
    torch.testing.assert_close(lse, whole[1])
    for gradient, expected in zip(gradients(out), gradients(whole[0]), strict=True):
        assert not gradient.isnan().any()
        torch.testing.assert_close(gradient, expected)


def test_the_key_ranges_of_a_rank_are_those_of_its_tokens():
    class Ranks:
        tokens, blocks, heads_group = 9, (range(1, 3), range(6, 8)), None

        def check(self, facts: Mapping[str, object]) -> None:
            pass

        def to_heads(self, x: torch.Tensor) -> torch.Tensor:
            return x

        gather = to_heads

    boundaries = torch.tensor([2, 4, 4, 7])
    batch = TrainingBatch.of_ranks(boundaries, 3, 4, Ranks())
    assert batch.key_start.tolist() == [0, 2, 4, 0]
    assert batch.key_end.tolist() == [0, 3, 7, 0]
    assert batch.cu_seqlens.tolist() == boundaries.tolist()
    with pytest.raises(ValueError, match=r"^hidden must have the 4 tokens of this rank, got 9$"):
        TrainingBatch.of_ranks(boundaries, 3, 9, Ranks())
