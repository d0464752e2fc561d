"""Index keys in their cache: bytes, the inverse, and equality of both backends."""

import math
import struct
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.torch_op import opcheck

from flashlatte import kv_cache
from flashlatte.kv_cache.index_formats import INDEX_FORMATS, index_format
from flashlatte.ops.index_quantize import api, index_gather, index_quantize
from flashlatte.testing.byte_oracles import E4M3_VALUES, e4m3_encode, float32

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NAMES = st.sampled_from(list(INDEX_FORMATS))
BACKENDS = ["reference", pytest.param("portable", marks=pytest.mark.interpreter)]


def generator(seed):
    return torch.Generator().manual_seed(seed)


def keys(tokens, head_dim, seed, dtype=torch.bfloat16):
    """Rows of very different magnitudes, some of zeros, some of subnormals."""
    sizes = torch.tensor([1.0, 1e-3, 1e-6, 300.0, 0.0, 1e-38])
    size = sizes[torch.randint(len(sizes), (tokens, 1), generator=generator(seed))]
    return (torch.randn(tokens, head_dim, generator=generator(seed + 1)) * size).to(dtype)


def fp8_bytes(row, rounding):
    """The e4m3 bytes and the scale of one key, value by value."""
    scale = float32(max(max(abs(x) for x in row), float32(1e-4)) / 448.0)
    if rounding == "power_of_two":
        mantissa, exponent = math.frexp(scale)
        scale = 2.0 ** (exponent - 1 if mantissa == 0.5 else exponent)
    return bytes(e4m3_encode(float32(x / scale)) for x in row), struct.pack("<f", scale)


def mxfp4_bytes(row):
    """The packed bytes and the E8M0 bytes of one key, value by value."""
    packed, scales = bytearray(), bytearray()
    for begin in range(0, len(row), 32):
        group = row[begin : begin + 32]
        exponent = max(math.ceil(math.log2(max(abs(x) for x in group) / 6)) if any(group) else -126, -126)
        codes = []
        for x in group:
            distances = [abs(abs(x) / 2.0**exponent - value) for value in E2M1]
            best = min(distances)
            near = [code for code, distance in enumerate(distances) if distance == best]
            code = next((code for code in near if code % 2 == 0), near[0])
            codes.append(code | (8 if math.copysign(1, x) < 0 else 0))
        packed += bytes(low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True))
        scales.append(exponent + 127)
    return bytes(packed), bytes(scales)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rounding", ["exact", "power_of_two"])
@pytest.mark.parametrize("name", ["index_fp8", "index_mxfp4"])
def test_bytes_of_a_page(name, rounding, backend):
    page_size, head_dim = 5, 64
    k = keys(page_size, head_dim, 3)
    cache = kv_cache.allocate(index_format(name, head_dim), 2, page_size)
    index_quantize(cache, torch.arange(5, 10), k, scale_rounding=rounding, backend=backend)
    rows = [fp8_bytes(row, rounding) if name == "index_fp8" else mxfp4_bytes(row) for row in k.tolist()]
    expected = b"".join(values for values, _ in rows) + b"".join(scales for _, scales in rows)
    assert bytes(cache[1].flatten().tolist()) == expected
    assert cache[0].eq(0).all()


@pytest.mark.interpreter
@given(
    name=NAMES,
    head_dim=st.sampled_from([32, 64, 128]),
    page_size=st.integers(1, 70),
    tokens=st.integers(1, 40),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    slot_dtype=st.sampled_from([torch.int32, torch.int64]),
    rounding=st.sampled_from(["exact", "power_of_two"]),
    gap=st.integers(0, 9),
    seed=st.integers(0, 1000),
)
def test_portable_writes_the_references_bytes(
    name, head_dim, page_size, tokens, dtype, slot_dtype, rounding, gap, seed
):
    layout = index_format(name, head_dim)
    pages = 3 + tokens // page_size
    k = keys(tokens, head_dim + gap, seed, dtype)[:, :head_dim]
    k[0, 0] = (torch.nan, torch.inf, 0.0, -0.0)[seed % 4]
    slots = torch.randperm(pages * page_size, generator=generator(seed))[:tokens].to(slot_dtype)
    invalid = (-1, pages * page_size, -(2**31), 2**31 - 1)
    slots[:: 3 + seed % 3] = torch.tensor(invalid[seed % 4]).to(slot_dtype)
    stride = page_size * layout.record_width + gap
    caches = []
    for backend in ("reference", "portable"):
        storage = torch.full((pages * stride,), 7).to(layout.record_dtype)
        shape = (pages, page_size, 1, layout.record_width)
        cache = storage.as_strided(shape, (stride, layout.record_width, layout.record_width, 1))
        index_quantize(cache, slots, k, scale_rounding=rounding, backend=backend)
        caches.append(storage.view(torch.uint8))
    differing = caches[0] != caches[1]
    if seed % 4 == 0:  # bits of a NaN scale are free
        assert int(differing.sum()) <= 4
    else:
        assert not differing.any()


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    name=NAMES,
    page_size=st.integers(1, 20),
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=4),
    from_start=st.booleans(),
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 1000),
)
def test_gather_returns_what_was_written(backend, name, page_size, lengths, from_start, index_dtype, seed):
    layout = index_format(name, 64)
    columns = max(1, *(-(-length // page_size) for length in lengths)) + 1
    pages = len(lengths) * columns
    table = torch.randperm(pages, generator=generator(seed)).view(len(lengths), columns)
    cache = kv_cache.allocate(layout, pages, page_size)
    starts = torch.zeros(len(lengths), dtype=torch.long) if from_start else torch.arange(len(lengths)) % 3
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    total = int(cu_seqlens[-1])
    k = keys(total, 64, seed)
    slots = []
    for request, length in enumerate(lengths):
        position = torch.arange(length) + starts[request]
        position = position[position < columns * page_size]
        slots.append(table[request, position // page_size] * page_size + position % page_size)
        slots[-1] = torch.nn.functional.pad(slots[-1], (0, length - len(position)), value=-1)
    slots = torch.cat(slots)
    index_quantize(cache, slots, k, backend="reference")
    broken = table.clone()
    broken[0, 0] = (-1, pages, 2**31 - 1)[seed % 3]
    values, scales = index_gather(
        cache,
        broken.to(index_dtype),
        cu_seqlens.to(index_dtype),
        total + 2,
        head_dim=64,
        seq_starts=None if from_start else starts.to(index_dtype),
        backend=backend,
    )
    expected = layout.decode(layout.encode(k, k[:, :0], 1.0, "exact"), 1.0)
    lost = torch.zeros(total, dtype=torch.bool)
    lost[: lengths[0]] = (torch.arange(lengths[0]) + starts[0]) < page_size
    expected[lost | (slots < 0)] = 0
    planes = [values.view(layout.planes[0].dtype)]
    if scales is not None:
        planes.append(scales.view(torch.uint8).view(total + 2, -1))
    actual = layout.decode(tuple(plane[:total] for plane in planes), 1.0)
    assert actual.equal(expected)
    for plane in planes:
        assert plane[total:].view(torch.uint8).eq(0).all()


def test_rows_of_no_request_are_left():
    cache = kv_cache.allocate(index_format("index_fp8"), 1, 8)
    values = torch.full((6, 128), 3.0).to(torch.float8_e4m3fn)
    scales = torch.full((6,), 9.0)
    table = torch.zeros(1, 1, dtype=torch.int32)
    index_gather(cache, table, torch.tensor([0, 4]), 6, values=values, scales=scales)
    assert values.float()[:4].eq(0).all()
    assert values.float()[4:].eq(3).all()
    assert scales.tolist() == [0.0] * 4 + [9.0] * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_single_scale_may_have_any_stride(backend):
    cache = kv_cache.allocate(index_format("index_fp8", 32), 1, 4)
    index_quantize(cache, torch.arange(1), torch.full((1, 32), 448.0), backend="reference")
    scales = torch.zeros(5)
    table, cu_seqlens = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, 1])
    index_gather(cache, table, cu_seqlens, 1, head_dim=32, scales=scales[1::5], backend=backend)
    assert scales.tolist() == [0.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_without_an_end_are_the_last_requests(backend):
    cache = kv_cache.allocate(index_format("index_bf16", 32), 3, 4)
    index_quantize(cache, torch.arange(12), keys(12, 32, 0), backend="reference")
    table = torch.tensor([[2, 0], [1, 0]])
    arguments = {"total_tokens": 9, "head_dim": 32, "backend": backend}
    expected, _ = index_gather(cache, table, torch.tensor([0, 3, 9]), **arguments)
    assert expected.any(dim=1).all()
    assert index_gather(cache, table, torch.tensor([0, 3]), **arguments)[0].equal(expected)


def test_decoded_values_are_the_tables():
    layout = index_format("index_fp8", 32)
    values = torch.arange(32, dtype=torch.uint8).view(1, 32)
    rows = layout.decode((values, torch.tensor([[0, 0, 0, 64]], dtype=torch.uint8)), 1.0)
    assert rows[0].tolist() == [2.0 * E4M3_VALUES[byte] for byte in range(32)]


def test_no_tokens():
    cache = kv_cache.allocate(index_format("index_fp8"), 1, 8)
    index_quantize(cache, torch.empty(0, dtype=torch.int64), torch.empty(0, 128))
    assert cache.eq(0).all()


def call(**change):
    arguments: dict[str, Any] = {
        "cache": torch.zeros(2, 8, 1, 132, dtype=torch.uint8),
        "slot_mapping": torch.arange(4),
        "k": torch.zeros(4, 128),
    }
    index_quantize(**(arguments | change))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"k": torch.zeros(4, 96)}, ValueError, "k must have a head dim of 32, 64 or 128, got 96"),
        ({"k": torch.zeros(4, 128, dtype=torch.int32)}, TypeError, "k must be bfloat16 or float16 or float32"),
        ({"k": torch.zeros(3, 128)}, ValueError, "slot_mapping must not be longer than k"),
        ({"cache": torch.zeros(2, 8, 1, 131, dtype=torch.uint8)}, ValueError, "cache must hold index keys of 128"),
        ({"cache": torch.zeros(2, 8, 2, 132, dtype=torch.uint8)}, ValueError, "cache must have shape"),
        ({"cache": torch.zeros(2, 8, 1, 264, dtype=torch.uint8)[..., :132]}, ValueError, "must have contiguous pages"),
        ({"cache": None}, TypeError, "cache must be a tensor"),
        ({"scale_rounding": "down"}, ValueError, "scale_rounding must be one of"),
        ({"slot_mapping": torch.zeros(4)}, TypeError, "slot_mapping must be int32 or int64"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        call(**change)


def test_opcheck():
    opcheck(api, "index_quantize", call)
    table = torch.zeros(1, 1, dtype=torch.int32)
    cache = torch.zeros(2, 8, 1, 132, dtype=torch.uint8)
    opcheck(api, "index_gather", lambda: index_gather(cache, table, torch.tensor([0, 4]), 4))
