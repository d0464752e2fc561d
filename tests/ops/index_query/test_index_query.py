"""Index queries compared with the formulas in float64, and equality of both backends."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.torch_op import opcheck

from flashlatte.ops.index_query import api, index_query, index_query_mxfp4

BACKENDS = ["reference", pytest.param("portable", marks=pytest.mark.interpreter)]


def oracle(q, weights, cos_sin, positions, rope_first, interleaved, hadamard, smallest_amax, power_of_two):
    """float64 (q · scale⁻¹, scale) by rotating each pair as a complex number."""
    x = q.double().clone()
    tokens, heads, head_dim = x.shape
    if cos_sin is not None:
        pairs = cos_sin.shape[1] // 2
        at = 0 if rope_first else head_dim - 2 * pairs
        for token in range(tokens):
            row = cos_sin[min(max(int(positions[token]), 0), len(cos_sin) - 1)].double()
            for pair in range(pairs):
                i, j = (at + 2 * pair, at + 2 * pair + 1) if interleaved else (at + pair, at + pair + pairs)
                turned = torch.complex(x[token, :, i], x[token, :, j]) * torch.complex(row[pair], row[pairs + pair])
                x[token, :, i], x[token, :, j] = turned.real, turned.imag
    if hadamard:
        signs = [[(-1.0) ** bin(i & j).count("1") for j in range(head_dim)] for i in range(head_dim)]
        x = x.to(q.dtype).double() @ torch.tensor(signs, dtype=torch.float64) / math.sqrt(head_dim)
    scale = x.abs().amax(dim=-1).clamp_min(smallest_amax) / 448
    if power_of_two:
        scale = torch.exp2(torch.log2(scale).ceil())
    return x / scale.unsqueeze(-1), scale


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    tokens=st.integers(1, 4),
    heads=st.sampled_from([1, 8, 20, 64]),
    head_dim=st.sampled_from([32, 64, 128]),
    rope=st.sampled_from([None, 16, 32]),
    rope_first=st.booleans(),
    interleaved=st.booleans(),
    hadamard=st.booleans(),
    rounding=st.sampled_from(["exact", "power_of_two"]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    seed=st.integers(0, 1000),
)
def test_against_float64(
    backend, tokens, heads, head_dim, rope, rope_first, interleaved, hadamard, rounding, dtype, seed
):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(tokens, heads, head_dim + 8, generator=generator).to(dtype)[..., :head_dim]
    weights = torch.randn(tokens, heads, generator=generator).to(dtype)
    cos_sin = positions = None
    if rope is not None:
        angles = torch.rand(9, rope // 2, generator=generator) * 6
        cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
        positions = torch.randint(-2, 12, (tokens,), generator=generator)
    values, folded = index_query(
        q,
        weights,
        cos_sin,
        positions,
        rope_first=rope_first,
        interleaved=interleaved,
        hadamard=hadamard,
        smallest_amax=1e-4,
        scale_rounding=rounding,
        backend=backend,
    )
    expected, scale = oracle(
        q, weights, cos_sin, positions, rope_first, interleaved, hadamard, 1e-4, rounding == "power_of_two"
    )
    # Rotated values may be rounded to q's dtype one ulp differently before the transform.
    slack = 4 * torch.finfo(dtype).eps if hadamard and rope is not None else 1e-6
    factor = folded.double() / (weights.double() * head_dim**-0.5 * heads**-0.5)
    if rounding == "exact":
        torch.testing.assert_close(factor, scale, rtol=slack + 1e-6, atol=0)
        # Half an e4m3 ulp: 2^-4 of the value, or half the smallest step.
        error = (values.double() - expected).abs()
        assert (error <= expected.abs() * (2.0**-4 + slack) + 2.0**-10 + 448 * slack).all()
    else:
        assert factor.log2().round().sub(factor.log2()).abs().max() < 1e-5
        assert (factor / scale).log2().abs().max() <= 1.0 + 1e-5


def test_defaults_are_v32s():
    q, weights = torch.zeros(2, 4, 128), torch.ones(2, 4)
    values, folded = index_query(q, weights)
    assert values.float().eq(0).all()
    torch.testing.assert_close(folded, torch.full((2, 4), 1e-10 / 448 * 128**-0.5 * 0.5), rtol=1e-6, atol=0)


def test_no_tokens():
    values, folded = index_query(torch.empty(0, 4, 64), torch.empty(0, 4))
    assert values.shape == (0, 4, 64)
    assert folded.shape == (0, 4)


def call(**change):
    arguments: dict[str, Any] = {
        "q": torch.zeros(3, 4, 128),
        "weights": torch.zeros(3, 4),
        "cos_sin": torch.ones(5, 64),
        "positions": torch.arange(3),
    }
    return index_query(**(arguments | change))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": torch.zeros(3, 4, 96)}, ValueError, "q must have a head dim of 32, 64 or 128, got 96"),
        ({"weights": torch.zeros(3, 5)}, ValueError, "weights must have shape"),
        ({"positions": None}, ValueError, "cos_sin and positions must be given together"),
        ({"cos_sin": torch.ones(5, 63)}, ValueError, "cos_sin must have an even width"),
        ({"cos_sin": torch.ones(5, 256)}, ValueError, "cos_sin must have an even width of at most 128"),
        ({"hadamard": 1}, TypeError, "hadamard must be True or False"),
        ({"smallest_amax": 0.0}, ValueError, "smallest_amax must be a finite number above 0, got 0"),
        ({"smallest_amax": math.inf}, ValueError, "smallest_amax must be a finite number above 0, got inf"),
        (
            {"smallest_amax": 1e300},
            ValueError,
            r"smallest_amax must be a number that is a normal float32, got 1e\+300",
        ),
        (
            {"smallest_amax": 1e-300},
            ValueError,
            "smallest_amax must be a number that is a normal float32, got 1e-300",
        ),
        ({"head_scale": math.nan}, ValueError, "head_scale must be a finite number, got nan"),
        (
            {"softmax_scale": 1e30, "head_scale": -1e30},
            ValueError,
            "head_scale times softmax_scale must be a finite float32 number, got -1.0",
        ),
        ({"scale_rounding": "down"}, ValueError, "scale_rounding must be one of"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        call(**change)


def test_scales_may_change_in_a_compiled_program():
    q, weights = torch.randn(2, 3, 32), torch.randn(2, 3)
    compiled = torch.compile(index_query, fullgraph=True, dynamic=True, backend="eager")
    for head_scale in (0.5, 2.0):
        expected = index_query(q, weights, head_scale=head_scale)[1]
        assert torch.equal(compiled(q, weights, head_scale=head_scale)[1], expected)


def test_opcheck():
    opcheck(api, "index_query", call)


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    heads=st.sampled_from([1, 5, 64]),
    sizes=st.sampled_from([(32, 16), (64, 16), (128, 16), (64, 32), (128, 64)]),
    hadamard=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    seed=st.integers(0, 1000),
)
def test_mxfp4_against_float64(backend, heads, sizes, hadamard, dtype, seed):
    head_dim, rope_dim = sizes
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(3, heads, head_dim, generator=generator).to(dtype)
    weights = torch.randn(3, heads, generator=generator)
    angles = torch.rand(9, rope_dim // 2, generator=generator) * 6
    cos_sin, positions = torch.cat((angles.cos(), angles.sin()), dim=-1), torch.tensor([-1, 4, 20])
    values, scales, folded = index_query_mxfp4(q, weights, cos_sin, positions, hadamard=hadamard, backend=backend)
    torch.testing.assert_close(folded, weights * (head_dim * heads) ** -0.5)
    exact, scale = oracle(q, weights, cos_sin, positions, False, True, hadamard, 1e-4, False)
    tiles = (exact * scale.unsqueeze(-1)).unflatten(-1, (-1, 32))
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    codes = torch.stack((values & 15, values >> 4), dim=-1).flatten(-2).unflatten(-1, (-1, 32)).long()
    factors = torch.exp2(scales.double() - 127).unsqueeze(-1)
    restored = magnitudes[codes & 7] * torch.where(codes > 7, -1.0, 1.0) * factors
    slack = 8 * torch.finfo(dtype).eps if hadamard else 1e-6
    # The largest value of a tile is at most 6 steps, and above 3; errors are at most half the gap between codes.
    assert (tiles.abs().amax(dim=-1, keepdim=True) <= 6 * factors * (1 + slack)).all()
    assert (tiles.abs().amax(dim=-1, keepdim=True) > 3 * factors * (1 - slack)).all()
    assert ((restored - tiles).abs() <= (tiles.abs() / 5).clamp_min(0.25 * factors) * (1 + slack) + 6 * slack).all()


def test_mxfp4_without_tokens():
    values, scales, folded = index_query_mxfp4(torch.empty(0, 4, 64), torch.empty(0, 4))
    assert values.shape == (0, 4, 32)
    assert scales.shape == (0, 4, 2)
    assert folded.shape == (0, 4)


@pytest.mark.parametrize(
    ("change", "error", "message"), [({"q": torch.zeros(3, 4, 96)}, ValueError, "q must have a h")]
)
def test_mxfp4_errors(change, error, message):
    with pytest.raises(error, match=message):
        index_query_mxfp4(**({"q": torch.zeros(3, 4, 128), "weights": torch.zeros(3, 4)} | change))


def test_mxfp4_opcheck():
    opcheck(api, "index_query", lambda: index_query_mxfp4(torch.zeros(3, 4, 128), torch.zeros(3, 4)))
