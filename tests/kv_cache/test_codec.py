# Wrong arguments are given on purpose.
# pyright: reportArgumentType=false

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from flashlatte import kv_cache
from flashlatte.kv_cache import turboquant
from flashlatte.testing import byte_oracles

NAMES = kv_cache.FORMAT_NAMES
PAGE_SIZES = st.integers(1, 9)
SIZES = st.sampled_from([1e-5, 0.1, 3.0, 1000.0])


def draw_rows(seed, *shape, size=0.1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size


def draw_bytes(seed, *shape):
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def as_bytes(x):
    return bytes(x.view(torch.uint8).flatten().tolist())


def page_bytes(cache, page, used):
    """The first bytes of a page in memory order."""
    raw = cache.view(torch.uint8)
    return as_bytes(raw.as_strided((used,), (1,), raw.storage_offset() + page * raw.stride(0)))


@given(seed=st.integers(0, 2**32), size=SIZES, scale_rounding=st.sampled_from(["power_of_two", "exact"]))
def test_v32_records_are_the_oracles_bytes(seed, size, scale_rounding):
    rows = draw_rows(seed, 2, 576, size=size)
    records = kv_cache.quantize(rows, "v32", scale_rounding=scale_rounding)
    for row, record in zip(rows.tolist(), records, strict=True):
        assert as_bytes(record) == byte_oracles.v32_encode(row, scale_rounding)


@given(seed=st.integers(0, 2**32), size=SIZES)
def test_model1_records_are_the_oracles_bytes(seed, size):
    rows = draw_rows(seed, 2, 512, size=size)
    for row, record in zip(rows.tolist(), kv_cache.quantize(rows, "model1"), strict=True):
        assert as_bytes(record) == byte_oracles.model1_encode_page([row])


@given(seed=st.integers(0, 2**32), page_size=PAGE_SIZES)
def test_v32_pages_are_the_oracles_bytes(seed, page_size):
    rows = draw_rows(seed, 2, page_size, 1, 576)
    cache = kv_cache.pack(rows, "v32")
    for page in range(2):
        expected = b"".join(byte_oracles.v32_encode(row) for row in rows[page, :, 0].tolist())
        assert page_bytes(cache, page, 656 * page_size) == expected


@given(seed=st.integers(0, 2**32), page_size=PAGE_SIZES)
def test_model1_pages_are_the_oracles_bytes(seed, page_size):
    rows = draw_rows(seed, 2, page_size, 1, 512)
    cache = kv_cache.pack(rows, "model1")
    for page in range(2):
        expected = byte_oracles.model1_encode_page(rows[page, :, 0].tolist())
        assert page_bytes(cache, page, 584 * page_size) == expected
    assert cache.stride(0) % 576 == 0


@given(seed=st.integers(0, 2**32), scales=st.lists(st.floats(width=32, allow_nan=False), min_size=4, max_size=4))
@example(seed=0, scales=[3.4e38, -0.3, 1e-45, math.inf])
def test_the_v32_reader_honours_any_float32_scale(seed, scales):
    record = draw_bytes(seed, 656)
    record[512:528] = torch.tensor(scales).view(torch.uint8)
    expected = torch.tensor(byte_oracles.v32_decode(as_bytes(record)))
    actual = kv_cache.dequantize(record, "v32", dtype=torch.float32)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@given(seed=st.integers(0, 2**32), page_size=PAGE_SIZES, dtype=st.sampled_from([torch.uint8, torch.int8]))
def test_model1_pages_read_as_the_oracle_reads_them(seed, page_size, dtype):
    cache = kv_cache.allocate("model1", 2, page_size)
    cache.copy_(draw_bytes(seed, *cache.shape))
    rows = kv_cache.unpack(cache.view(dtype), dtype=torch.float32)
    for page in range(2):
        expected = byte_oracles.model1_decode_page(page_bytes(cache, page, 584 * page_size), page_size)
        torch.testing.assert_close(rows[page, :, 0], torch.tensor(expected), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("name", "latent"), [("v32", 512), ("model1", 448)])
def test_rope_is_stored_unchanged(name, latent):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16).view(-1, 64)
    rope = every[every.isfinite().all(dim=-1)]
    records = kv_cache.quantize(torch.zeros(rope.shape[0], latent, dtype=torch.bfloat16), name, rope=rope)
    restored = kv_cache.dequantize(records, name)[:, latent:]
    assert restored.view(torch.int16).equal(rope.view(torch.int16))


@pytest.mark.parametrize("name", NAMES)
def test_separate_latent_and_rope_equal_the_whole_row(name):
    layout = kv_cache.get_format(name)
    rows = draw_rows(0, 3, layout.head_dim).bfloat16()
    whole = kv_cache.quantize(rows, name)
    parts = kv_cache.quantize(rows[:, : layout.latent_dim], name, rope=rows[:, layout.latent_dim :])
    assert whole.view(torch.uint8).equal(parts.view(torch.uint8))
    assert whole.shape == (3, layout.record_width)
    assert whole.dtype == layout.record_dtype


@pytest.mark.parametrize("name", NAMES)
def test_negated_views_are_encoded_by_their_values(name):
    layout = kv_cache.get_format(name)
    rows = draw_rows(0, 3, layout.head_dim).bfloat16()
    rope = torch.ops.aten._neg_view(-rows[:, layout.latent_dim :])
    assert rope.is_neg()
    records = kv_cache.quantize(rows[:, : layout.latent_dim], name, rope=rope)
    assert records.view(torch.uint8).equal(kv_cache.quantize(rows, name).view(torch.uint8))


@pytest.mark.parametrize(
    ("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)]
)
def test_untiled_formats_keep_rows_unchanged(name, dtype):
    rows = draw_rows(0, 3, 4, 1, 40).to(dtype)
    cache = kv_cache.pack(rows, name)
    assert cache.equal(rows)
    assert kv_cache.unpack(cache, dtype=dtype).equal(rows)
    assert kv_cache.dequantize(kv_cache.quantize(rows, name), name, dtype=dtype).equal(rows)


@pytest.mark.parametrize("scale", [None, 0.05, torch.tensor([0.05]), torch.tensor(0.05)])
def test_fp8_is_the_row_over_one_scale(scale):
    number = 1.0 if scale is None else 0.05
    rows = draw_rows(0, 3, 40)
    rows[0, 0], rows[0, 1] = 1e4, -1e4
    records = kv_cache.quantize(rows, "fp8", scale=scale)
    assert records.dtype == torch.float8_e4m3fn
    divided = (rows / torch.tensor(number)).flatten().tolist()
    assert as_bytes(records) == bytes(map(byte_oracles.e4m3_encode, divided))
    restored = kv_cache.dequantize(records, "fp8", scale=scale, dtype=torch.float32)
    expected = torch.tensor([byte_oracles.E4M3_VALUES[byte] for byte in as_bytes(records)]) * torch.tensor(number)
    assert restored.flatten().equal(expected)
    assert restored[0, 0] == 448 * torch.tensor(number)


@pytest.mark.parametrize("name", ["v32", "model1", "fp8"])
def test_a_nan_row_does_not_affect_its_neighbors(name):
    rows = draw_rows(0, 3, kv_cache.get_format(name).head_dim)
    clean = kv_cache.quantize(rows, name)
    rows[1] = math.nan
    poisoned = kv_cache.quantize(rows, name)
    assert kv_cache.dequantize(poisoned, name)[1].isnan().all()
    assert poisoned.view(torch.uint8)[0::2].equal(clean.view(torch.uint8)[0::2])


@pytest.mark.parametrize("name", NAMES)
def test_allocate_is_zero_and_of_the_formats_width(name):
    layout = kv_cache.get_format(name)
    cache = kv_cache.allocate(name, 3, 5)
    assert cache.shape == (3, 5, 1, layout.record_width)
    assert cache.dtype == layout.record_dtype
    assert cache.view(torch.uint8).eq(0).all()
    assert cache.stride(0) * cache.itemsize == layout.page_bytes(5)
    assert kv_cache.allocate(name, 1, 1, device="meta").device.type == "meta"


def test_the_heads_axis_of_a_cache_is_optional():
    cache = kv_cache.pack(draw_rows(0, 2, 3, 1, 576), "v32")
    assert kv_cache.unpack(cache[:, :, 0]).equal(kv_cache.unpack(cache))


def test_a_wider_page_stride_is_honoured():
    rows = draw_rows(0, 4, 3, 1, 512)
    cache = kv_cache.pack(rows, "model1")
    assert kv_cache.unpack(cache[::2]).equal(kv_cache.unpack(cache)[::2])
    assert kv_cache.unpack(cache[1:]).equal(kv_cache.unpack(cache)[1:])


ROW = torch.zeros(2, 576)
LATENT, ROPE = ROW[:, :512], ROW[:, 512:]
V32_CACHE = kv_cache.allocate("v32", 2, 3)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: kv_cache.allocate("v33", 1, 1), ValueError, "^cache_format must be one of bf16,.* got 'v33'$"),
        (lambda: kv_cache.allocate(["v32"], 1, 1), ValueError, r"^cache_format must be one of bf16,.* got \['v32'\]$"),
        (lambda: kv_cache.allocate("v32", 0, 1), ValueError, "^num_pages must be at least 1, got 0$"),
        (
            lambda: kv_cache.allocate("v32", 2**40, 2**20),
            ValueError,
            "^num_pages must make a cache of less than 2.63 bytes, got 1099511627776 of 1048576 tokens$",
        ),
        (
            lambda: kv_cache.allocate("v32", 10**12, 64),
            torch.OutOfMemoryError,
            "^num_pages must make a cache that fits .*, got 1,000,000,000,000 pages of 64 tokens in format v32, which "
            r"take 39,100,647.0 GiB \(",
        ),
        (
            lambda: turboquant.allocate("turboquant_4bit_nc", 10**12, 64, 8, 128),
            torch.OutOfMemoryError,
            "^num_pages must make a cache that fits .* in format turboquant_4bit_nc, which take .* GiB",
        ),
        (lambda: kv_cache.allocate("v32", 1, -1), ValueError, "^page_size must be at least 1, got -1$"),
        (lambda: kv_cache.allocate("v32", 1, 1.0), TypeError, "^page_size must be an int, got float$"),
        (lambda: kv_cache.allocate("model1", 1, 1, head_dim=576), ValueError, "^head_dim of format model1 is 512"),
        (lambda: kv_cache.quantize([0.0], "v32"), TypeError, "^x must be a tensor, got list$"),
        (lambda: kv_cache.quantize(ROW.double(), "v32"), TypeError, "^x must be bfloat16 or .*, got float64$"),
        (lambda: kv_cache.quantize(ROW[0, 0], "v32"), ValueError, "^x must have at least one axis, got a scalar$"),
        (lambda: kv_cache.quantize(LATENT, "v32", rope=[0.0]), TypeError, "^rope must be a tensor, got list$"),
        (lambda: kv_cache.quantize(LATENT, "v32", rope=ROPE.int()), TypeError, "^rope must be .*, got int32$"),
        (lambda: kv_cache.quantize(LATENT, "v32"), ValueError, "^x must be 576 wide for format v32 .* got 512$"),
        (lambda: kv_cache.quantize(ROW, "v32", rope=ROPE), ValueError, "^x and rope must be 512 and 64 wide"),
        (
            lambda: kv_cache.quantize(LATENT, "v32", rope=ROPE[:1]),
            ValueError,
            r"^rope must have x's leading shape \[2\]",
        ),
        (lambda: kv_cache.quantize(LATENT, "v32", rope=ROPE.to("meta")), ValueError, "^rope must have .* on meta$"),
        (lambda: kv_cache.quantize(ROW, "v32", scale=2.0), ValueError, "^scale must be None for format v32"),
        (lambda: kv_cache.quantize(ROW, "fp8", scale=0.0), ValueError, "^scale must be a finite number above 0, got 0"),
        (lambda: kv_cache.quantize(ROW, "fp8", scale=math.nan), ValueError, "^scale must be a finite number above 0"),
        (lambda: kv_cache.quantize(ROW, "fp8", scale="1"), TypeError, "^scale must be a number, got str$"),
        (lambda: kv_cache.quantize(ROW, "fp8", scale=ROW[0].double()), TypeError, "^scale must be .* got float64$"),
        (lambda: kv_cache.quantize(ROW, "fp8", scale=ROW[0]), ValueError, r"^scale must have one element, .* \[576\]$"),
        (lambda: kv_cache.quantize(ROW, "v32", scale_rounding="up"), ValueError, "^scale_rounding must be one of"),
        (
            lambda: kv_cache.quantize(ROW[:, :512], "model1", scale_rounding="exact"),
            ValueError,
            "^scale_rounding must be 'power_of_two'",
        ),
        (lambda: kv_cache.quantize(None, "v32"), TypeError, "^x must be a tensor, got NoneType$"),
        (
            lambda: kv_cache.allocate("index_fp8", 1, 1, head_dim=ROW),
            TypeError,
            "^head_dim must be an int, got Tensor$",
        ),
        (lambda: kv_cache.dequantize(ROW, "fp32", dtype="cpu"), TypeError, "^dtype must be .* float32, got cpu$"),
        (lambda: kv_cache.unpack(V32_CACHE, dtype=torch.int8), TypeError, "^dtype must be .*, got torch.int8$"),
        (lambda: kv_cache.dequantize([0], "v32"), TypeError, "^records must be a tensor, got list$"),
        (lambda: kv_cache.dequantize(torch.tensor(0), "v32"), ValueError, "^records must have at least one axis"),
        (lambda: kv_cache.dequantize(ROW, "v32"), TypeError, "^records of format v32 must be uint8 .* got float32$"),
        (
            lambda: kv_cache.dequantize(ROW.byte(), "v32"),
            ValueError,
            "^records of format v32 must be 656 wide, got 576",
        ),
        (lambda: kv_cache.dequantize(ROW.byte()), ValueError, "^records must be a .*got uint8 576 wide$"),
        (lambda: kv_cache.pack(ROW, "v32"), ValueError, r"^rows must have shape \[pages, page_size, 1, head_dim\]"),
        (lambda: kv_cache.pack(ROW[None, :, None].int(), "v32"), TypeError, "^rows must be .* got int32$"),
        (lambda: kv_cache.pack(LATENT[None, :, None], "v32"), ValueError, "^rows must be 576 wide for format v32"),
        (lambda: kv_cache.unpack([0]), TypeError, "^cache must be a tensor, got list$"),
        (lambda: kv_cache.unpack(V32_CACHE[0, 0]), ValueError, r"^cache must have shape \[pages, page_size, 1, 656\]"),
        (
            lambda: kv_cache.unpack(V32_CACHE[:, ::2]),
            ValueError,
            "^cache of format v32 must have a token stride of 656",
        ),
        (
            lambda: kv_cache.unpack(V32_CACHE[:1].expand(2, 3, 1, 656)),
            ValueError,
            "^cache .* page stride of at least 1968 bytes",
        ),
        (lambda: kv_cache.unpack(V32_CACHE, "bf16"), TypeError, "^cache of format bf16 must be bfloat16, got uint8$"),
        (
            lambda: kv_cache.unpack(V32_CACHE, "model1"),
            ValueError,
            "^cache of format model1 must be 584 wide, got 656$",
        ),
    ],
)
def test_errors_name_the_argument(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("name", [name for name in NAMES if kv_cache.get_format(name).record_dtype == torch.uint8])
@pytest.mark.parametrize("offset", [0, 1, 2])
def test_a_token_is_decoded_at_any_address(name, offset):
    layout = kv_cache.get_format(name)
    width = layout.record_width
    buffer = torch.zeros(offset + width + 5, dtype=torch.uint8)
    # One page of one token, with a page stride that no itemsize divides.
    cache = buffer.as_strided((1, 1, 1, width), (width + 5, width, 1, 1), offset)
    cache.copy_(kv_cache.quantize(draw_rows(0, layout.head_dim), layout))
    expected = kv_cache.unpack(cache.clone(), layout)[0, 0, 0]
    assert expected.any()
    for result in (
        kv_cache.unpack(cache, layout)[0, 0, 0],
        kv_cache.read(cache, torch.tensor(0), cache_format=layout),
        kv_cache.dequantize(cache[0, 0, 0], layout),
    ):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("name", ["v32", "v32_no_rope", "model1", "v41"])
def test_records_are_decoded_under_vmap(name):
    records = kv_cache.quantize(draw_rows(0, 2, 3, kv_cache.get_format(name).head_dim), name)
    try:
        torch.func.vmap(lambda row: row.view(torch.int8))(records)
    except RuntimeError:
        pytest.skip(f"PyTorch {torch.__version__} cannot view another dtype under vmap")
    decoded = torch.func.vmap(lambda record: kv_cache.dequantize(record, name))(records)
    assert torch.equal(decoded, kv_cache.dequantize(records, name))
