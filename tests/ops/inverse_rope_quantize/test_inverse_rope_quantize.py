"""Values and scales compared with a float64 rotation, group by group, and bitwise with the definition."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.torch_op import opcheck

from flashlatte import inverse_rope_quantize
from flashlatte.ops.inverse_rope_quantize import api
from flashlatte.runtime import machine
from flashlatte.testing.byte_oracles import E4M3_VALUES

BACKEND = "portable" if machine.interpreting() else "reference"
# Run both without the interpreter (reference) and with it (kernel).
pytestmark = [pytest.mark.interpreter] if machine.interpreting() else []


@given(
    tokens=st.integers(0, 6),
    heads=st.sampled_from([(4, 1), (4, 2), (6, 6), (20, 4)]),
    head_dim=st.sampled_from([128, 512]),
    rope=st.sampled_from([8, 64]),
    packed=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    factor=st.sampled_from([1.0, 0.0, 1e-12, 3e4]),
    seed=st.integers(0, 1000),
)
def test_against_float64(tokens, heads, head_dim, rope, packed, dtype, factor, seed):
    heads, groups = heads
    packed = packed and head_dim == 512
    generator = torch.Generator().manual_seed(seed)
    o = (torch.randn(tokens, heads, head_dim + 8, generator=generator) * factor).to(dtype)[..., :head_dim]
    angles = torch.rand(9, rope // 2, generator=generator) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions = torch.randint(-2, 12, (tokens,), generator=generator)
    values, scales = inverse_rope_quantize(o, cos_sin, positions, groups, packed_scales=packed, backend=BACKEND)

    width, padded = heads // groups * head_dim, -(-tokens // 4) * 4
    columns = width // 512 if packed else width // 128
    assert values.shape == (tokens, groups, width)
    assert scales.shape == (tokens, groups, columns)
    if tokens > 1:
        assert values.stride() == (width, tokens * width, 1)
        assert scales.stride() == (1, columns * padded, padded)
        whole = scales.as_strided((groups, columns, padded), (columns * padded, padded, 1))
        assert not whole[..., tokens:].any()
    if packed:
        words = [struct.pack("<i", word) for word in scales.flatten().tolist()]
        scales = torch.tensor([2.0 ** (byte - 127) for word in words for byte in word], dtype=torch.float64)
    factors = scales.double().reshape(tokens, heads, head_dim // 128)

    pairs = rope // 2
    turned = o.double()
    for token in range(tokens):
        row = cos_sin[min(max(int(positions[token]), 0), 8)].double()
        tail = torch.view_as_complex(turned[token, :, head_dim - rope :].reshape(heads, pairs, 2).contiguous())
        back = torch.view_as_real(tail * torch.complex(row[:pairs], -row[pairs:]))
        turned[token, :, head_dim - rope :] = back.flatten(1)
    tiles = turned.unflatten(-1, (-1, 128))
    largest = tiles.abs().amax(dim=-1).clamp_min(1e-10)
    # The smallest power of two that leaves amax within 448, up to float32's rounding at the border.
    assert factors.log2().frac().eq(0).all()
    assert (largest <= factors * 448 * (1 + 1e-6)).all()
    assert (largest > factors * 224 * (1 - 1e-6)).all()
    table = torch.tensor(E4M3_VALUES, dtype=torch.float64)
    codes = values.reshape(tokens, groups, width).contiguous().view(torch.uint8).long()
    restored = table[codes].reshape(tiles.shape) * factors.unsqueeze(-1)
    # Half a step of e4m3: 2^-4 of the value, or of the smallest normal one.
    bound = (tiles.abs() * 2.0**-4).clamp_min(2.0**-10 * factors.unsqueeze(-1)) * (1 + 1e-5)
    assert ((restored - tiles).abs() <= bound + 1e-6 * largest.unsqueeze(-1)).all()


def test_a_worked_example():
    """One head of 128 elements: 3 is rotated back by a quarter turn; amax 4 has the scale 2^-6, since 4 / 448 is above
    2^-7."""
    o = torch.zeros(1, 1, 128)
    o[0, 0, 0], o[0, 0, 126] = 4.0, 3.0
    cos_sin = torch.tensor([[0.0, 1.0]])
    values, scales = inverse_rope_quantize(o, cos_sin, torch.zeros(1, dtype=torch.int32), 1, backend=BACKEND)
    assert scales.tolist() == [[[2.0**-6]]]
    row = values.float()[0, 0]
    assert row[0] == 256
    assert row[126] == 0
    assert row[127] == -192
    assert math.isclose(row.abs().sum().item(), 448)


def call(**change):
    arguments: dict[str, Any] = {
        "o": torch.zeros(3, 4, 128),
        "cos_sin": torch.ones(5, 8),
        "positions": torch.arange(3),
        "groups": 2,
    }
    return inverse_rope_quantize(**(arguments | change))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"o": torch.zeros(3, 4, 96)}, ValueError, "^o must have a head dim that is a multiple of 128, got 96$"),
        (
            {"cos_sin": torch.ones(5, 7)},
            ValueError,
            "^cos_sin must be contiguous and have an even width of at most 128",
        ),
        ({"positions": torch.arange(2)}, ValueError, r"^positions must have shape \[3\]"),
        ({"groups": 3}, ValueError, "^groups must divide o's 4 heads, got 3$"),
        (
            {"packed_scales": True},
            ValueError,
            "^o must have a head dim that is a multiple of 512 for packed_scales, got 128$",
        ),
        ({"packed_scales": 1}, TypeError, "^packed_scales must be True or False"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        call(**change)


@pytest.mark.skipif(machine.interpreting(), reason="the reference's")
def test_opcheck():
    opcheck(api, "inverse_rope_quantize", call)
