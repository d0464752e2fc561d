"""``pack_seq`` and ``unpack_seq`` byte by byte, for the reference and the kernels."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.torch_op import opcheck

from flashlatte import pack_seq, unpack_seq
from flashlatte.ops.pack_seq import api
from flashlatte.runtime import machine

BACKEND = "portable" if machine.interpreting() else "reference"
# Run both without the interpreter (reference) and with it (kernels).
pytestmark = [pytest.mark.interpreter] if machine.interpreting() else []


def draw_bytes(dtype, *shape, seed):
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8, generator=generator)
    return numbers.view(dtype)


def bits(x):
    return x.contiguous().view(torch.uint8)


@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    first=st.integers(0, 2),
    missing=st.integers(0, 3),
    max_seqlen=st.integers(0, 7),
    inner=st.sampled_from([(1,), (3,), (2, 5), (2, 32)]),
    gap=st.sampled_from([0, 1, 16]),
    dtype=st.sampled_from(api.DTYPES),
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
    pad_value=st.sampled_from([0.0, 3.0]),
    seed=st.integers(0, 2**32),
)
def test_every_byte(lengths, first, missing, max_seqlen, inner, gap, dtype, index_dtype, pad_value, seed):
    boundaries = [first]
    for length in lengths:
        boundaries.append(boundaries[-1] + length)
    tokens, width = max(boundaries[-1] - missing, 0), math.prod(inner)
    x = draw_bytes(dtype, tokens, width + gap, seed=seed)[:, :width].unflatten(1, inner)
    cu_seqlens = torch.tensor(boundaries, dtype=index_dtype)

    packed = pack_seq(x, cu_seqlens, max_seqlen, pad_value=pad_value, backend=BACKEND)
    assert packed.shape == (len(lengths), max_seqlen, *inner)
    padding = torch.full(inner, pad_value).to(dtype)
    for request, length in enumerate(lengths):
        for position in range(max_seqlen):
            token = boundaries[request] + position
            expected = x[token] if position < length and token < tokens else padding
            assert bits(packed[request, position]).equal(bits(expected))

    out = draw_bytes(dtype, boundaries[-1] + 2, width + gap, seed=seed + 1)[:, :width].unflatten(1, inner)
    wanted = [bits(row) for row in out]
    for request, length in enumerate(lengths):
        for position in range(min(length, max_seqlen)):
            wanted[boundaries[request] + position] = bits(packed[request, position])
    unpacked = unpack_seq(packed, cu_seqlens, boundaries[-1] + 2, out=out, backend=BACKEND)
    assert unpacked is out
    assert all(bits(row).equal(expected) for row, expected in zip(out, wanted, strict=True))
    fresh = unpack_seq(packed, cu_seqlens, boundaries[-1] + 2, backend=BACKEND)
    assert bits(fresh[boundaries[-1] :]).eq(0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e5m2])
def test_padding_is_minus_infinity_by_default(dtype):
    packed = pack_seq(torch.zeros(2, 3, dtype=dtype), torch.tensor([0, 2, 2]), 3, backend=BACKEND)
    assert packed.float()[0, 2].eq(-math.inf).all()
    assert packed.float()[1].eq(-math.inf).all()


@pytest.mark.parametrize("infinity", [math.inf, -math.inf])
def test_an_infinity_is_nan_in_e4m3(infinity):
    x = torch.zeros(1, 4, dtype=torch.float8_e4m3fn)
    packed = pack_seq(x, torch.tensor([0, 1]), 2, pad_value=infinity, backend=BACKEND)
    assert packed.float()[0, 1].isnan().all()


@pytest.mark.parametrize("boundaries", [[-5, 2, 9, 4], [2**40, 2**41, -(2**40), 3], [0, 0, 0, 0]])
def test_boundaries_that_make_no_sense_read_nothing_else(boundaries):
    x = torch.ones(4, 8)
    packed = pack_seq(x, torch.tensor(boundaries), 5, pad_value=0.0, backend=BACKEND)
    unpacked = unpack_seq(packed, torch.tensor(boundaries), 4, backend=BACKEND)
    for numbers in (packed, unpacked):
        assert torch.isin(numbers, torch.tensor([0.0, 1.0])).all()


X, CU = torch.zeros(3, 2), torch.tensor([0, 1, 3])
PACKED = torch.zeros(2, 2, 4)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
def test_packing_compiles():
    x, cu_seqlens = torch.ones(1, 4), torch.tensor([0, 1])
    compiled = torch.compile(lambda x: pack_seq(x, cu_seqlens, 2, pad_value=2.0), fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), pack_seq(x, cu_seqlens, 2, pad_value=2.0))


def test_negative_zero_is_padding():
    x, cu_seqlens = torch.ones(1, 4), torch.tensor([0, 1])
    for zero in (0.0, -0.0, 0.0):
        packed = pack_seq(x, cu_seqlens, 2, pad_value=zero, backend=BACKEND)
        assert torch.equal(bits(packed[0, 1]), bits(torch.full((4,), zero)))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": [0]}, TypeError, "^x must be a tensor, got list$"),
        ({"x": X.double()}, TypeError, "^x must be bfloat16 or .* got float64$"),
        ({"x": X[:, 0]}, ValueError, "^x must have non-empty axes after its first 1"),
        ({"x": torch.zeros(2, 3).T}, ValueError, "^x must have contiguous tokens"),
        ({"cu_seqlens": CU.float()}, TypeError, "^cu_seqlens must be int32 or int64, got float32$"),
        ({"cu_seqlens": CU.to("meta")}, ValueError, "^cu_seqlens must be on cpu"),
        ({"max_seqlen": -1}, ValueError, "^max_seqlen must be at least 0, got -1$"),
        ({"x": X.to(torch.uint8)}, ValueError, "^pad_value must be representable in uint8, got -inf$"),
        ({"x": X.int(), "pad_value": 0.5}, ValueError, r"^pad_value must be representable in int32, got 0\.5$"),
        ({"pad_value": 1e39}, ValueError, r"^pad_value must be representable in float32, got 1e\+39$"),
        ({"out": torch.zeros(2, 3, 2)}, ValueError, r"^out must have shape \[2, 2, 2\]"),
        ({"out": torch.zeros(2, 2, 4)[..., :2]}, ValueError, "^out must be contiguous"),
        ({"backend": "hopper"}, ValueError, "^backend='hopper' cannot serve"),
    ],
)
def test_errors_of_packing_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        pack_seq(**({"x": X, "cu_seqlens": CU, "max_seqlen": 2} | change))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"packed": PACKED[0]}, ValueError, "^packed must have non-empty axes after its first 2"),
        ({"packed": PACKED[:1]}, ValueError, "^packed must have a row for each of cu_seqlens' 2 requests, got 1$"),
        ({"total_tokens": -1}, ValueError, "^total_tokens must be at least 0, got -1$"),
        ({"out": torch.zeros(2, 4)}, ValueError, r"^out must have shape \[3, 4\]"),
        ({"backend": "hopper"}, ValueError, "^backend='hopper' cannot serve"),
    ],
)
def test_errors_of_unpacking_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        unpack_seq(**({"packed": PACKED, "cu_seqlens": CU, "total_tokens": 3} | change))


@pytest.mark.skipif(machine.interpreting(), reason="the reference's")
def test_opcheck():
    opcheck(api, "pack_seq", lambda: pack_seq(X, CU, 2))
    opcheck(api, "unpack_seq", lambda: unpack_seq(PACKED, CU, 3))
