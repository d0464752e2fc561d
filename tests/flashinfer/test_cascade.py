"""Merging of states with base-2 lse, against float64."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashlatte import flashinfer
from flashlatte.testing import compare, oracles
from flashlatte.testing.compare import assert_close

LN_2 = math.log(2)


def states(number, tokens=5, heads=3, width=8, seed=0):
    """v [tokens, number, heads, width] and base-2 s [tokens, number, heads], in which some states are empty."""
    generator = torch.Generator().manual_seed(seed)
    v = torch.randn(tokens, number, heads, width, generator=generator)
    s = torch.randn(tokens, number, heads, generator=generator) * 5
    empty = torch.rand(tokens, number, heads, generator=generator) < 0.3
    return v.masked_fill(empty.unsqueeze(-1), torch.nan), s.masked_fill(empty, -torch.inf)


def expected(v, s):
    out, lse = oracles.merge_states(v.unbind(1), (s.double() * LN_2).unbind(1))
    return out, lse / LN_2


@given(number=st.integers(1, 12), seed=st.integers(0, 99))
def test_merge_states(number, seed):
    v, s = states(number, seed=seed)
    for result, wanted in zip(flashinfer.merge_states(v, s), expected(v, s), strict=True):
        assert_close(result, wanted, compare.FLOAT32)


@given(seed=st.integers(0, 99), dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_merge_state(seed, dtype):
    """lse of another dtype is converted to float32."""
    v, s = states(2, seed=seed)
    s = s.to(dtype)
    results = flashinfer.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1])
    assert results[1].dtype == torch.float32
    for result, wanted in zip(results, expected(v, s), strict=True):
        assert_close(result, wanted, compare.FLOAT32)


@pytest.mark.parametrize("mask", [None, [True, False, True, True, False], [0, 1, 0, 0, 1]])
def test_merge_state_in_place(mask):
    v, s = states(2)
    wanted, wanted_lse = expected(v, s)
    target, target_lse = v[:, 0].clone(), s[:, 0].clone()
    kept = torch.zeros(5, dtype=torch.bool)
    if mask is not None:
        mask = torch.tensor(mask) if isinstance(mask[0], bool) else torch.tensor(mask, dtype=torch.uint8)
        kept = ~mask.bool()
    assert flashinfer.merge_state_in_place(target, target_lse, v[:, 1], s[:, 1], mask) is None
    assert_close(target[~kept], wanted[~kept], compare.FLOAT32)
    assert_close(target_lse[~kept], wanted_lse[~kept], compare.FLOAT32)
    # Bitwise, with the NaN of empty states.
    assert target[kept].view(torch.int32).equal(v[kept, 0].contiguous().view(torch.int32))
    assert target_lse[kept].equal(s[kept, 0])


def test_refusals():
    v, s = states(2)
    missing: Any = None
    with pytest.raises(ValueError, match=r"v must have shape \[seq_len, states, heads, d\]"):
        flashinfer.merge_states(v[:, 0], s)
    with pytest.raises(ValueError, match=r"s must have shape \[5, 2, 3\]"):
        flashinfer.merge_states(v, s[:, :, :2])
    with pytest.raises(ValueError, match=r"v_b must have shape \[5, 3, 8\]"):
        flashinfer.merge_state(v[:, 0], s[:, 0], v[:4, 0], s[:, 0])
    for name, states_of in (("v_a", (missing, v[:, 1])), ("v_b", (v[:, 0], missing))):
        with pytest.raises(TypeError, match=f"{name} must be a tensor, got NoneType"):
            flashinfer.merge_state(states_of[0], s[:, 0], states_of[1], s[:, 1])
    for name, states_of in (("v", (missing, v[:, 1])), ("v_other", (v[:, 0], missing))):
        with pytest.raises(TypeError, match=f"{name} must be a tensor, got NoneType"):
            flashinfer.merge_state_in_place(states_of[0], s[:, 0], states_of[1], s[:, 1])
    with pytest.raises(TypeError, match="s must be float32, got float64"):
        flashinfer.merge_state_in_place(v[:, 0], s[:, 0].double(), v[:, 1], s[:, 1])
