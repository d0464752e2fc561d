"""Formats with a scale byte per block: bytes computed by hand and by the oracle, and rounding errors."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashlatte import kv_cache
from flashlatte.testing import byte_oracles

NAMES = ("v41", "v41_fp4", "nvfp4_ds_mla")
ENCODE = {
    "v41": byte_oracles.v41_encode,
    "v41_fp4": byte_oracles.v41_fp4_encode,
    "nvfp4_ds_mla": byte_oracles.nvfp4_encode,
}
DECODE = {
    "v41": byte_oracles.v41_decode,
    "v41_fp4": byte_oracles.v41_fp4_decode,
    "nvfp4_ds_mla": byte_oracles.nvfp4_decode,
}
SIZES = st.sampled_from([1e-5, 0.03, 3.0, 1000.0])


def generator(seed):
    return torch.Generator().manual_seed(seed)


def row_of(name, places):
    row = torch.zeros(kv_cache.get_format(name).head_dim)
    for place, value in places.items():
        row[place] = value
    return row


def bytes_at(name, row, begin, end):
    return kv_cache.quantize(row, name)[begin:end].tolist()


def test_v41_by_hand():
    # Block 1: amax 3 over 448 is 0.0067, of which the next power of two is 2^-7: 127 - 7 = 120.
    # 3 · 128 = 384 = 1.5 · 2^8: exponent 8 + 7, mantissa 4. -1 · 128 = 1.0 · 2^7: sign, exponent 14.
    # The last block, of rotated values: 448 · 2^3 needs a scale of 2^3: 130, and 448 is exponent 15, mantissa 6.
    row = row_of("v41", {32: 3.0, 33: -1.0, 511: 448.0 * 8})
    assert bytes_at("v41", row, 32, 35) == [0b0_1111_100, 0b1_1110_000, 0]
    assert bytes_at("v41", row, 511, 512) == [0b0_1111_110]
    # A block of zeros has the smallest scale, 2^-13.
    assert bytes_at("v41", row, 512, 528) == [114, 120, *[114] * 13, 130]


def test_v41_fp4_by_hand():
    # Block 1: amax 9 over 6 is 1.5: exponent 7, mantissa 4. 9 / 1.5 = 6 (code 7), -3 / 1.5 = -2 (code 12),
    # 0.75 / 1.5 = 0.5 (code 1), 3.75 / 1.5 = 2.5, between 2 and 3: the even code 4.
    row = row_of("v41_fp4", {16: 9.0, 17: -3.0, 18: 0.75, 19: 3.75})
    assert bytes_at("v41_fp4", row, 8, 11) == [0xC7, 0x41, 0]
    # A block of zeros has the smallest scale, 2^-9.
    assert bytes_at("v41_fp4", row, 256, 288) == [1, 0b0_0111_100, *[1] * 30]


def test_nvfp4_by_hand():
    # Block 6: amax 6.3 over 6 is 1.05: the next e4m3 number is 1.125 (exponent 7, mantissa 1), where 1 is nearer.
    # 6.3 / 1.125 = 5.6, nearest to 6 (code 7). Its scale is byte 8 · (6 % 4) + 6 // 4 = 17 of the scales.
    # Rope is e4m3 as it is: 1.5 is exponent 7, mantissa 4; 1000 saturates at 448.
    row = row_of("nvfp4_ds_mla", {97: 6.3, 512: 1.5, 575: 1000.0})
    assert bytes_at("nvfp4_ds_mla", row, 48, 50) == [0x70, 0]
    assert bytes_at("nvfp4_ds_mla", row, 256, 258) == [0b0_0111_100, 0]
    assert bytes_at("nvfp4_ds_mla", row, 319, 320) == [0b0_1111_110]
    assert bytes_at("nvfp4_ds_mla", row, 320, 352) == [*[1] * 17, 0b0_0111_001, *[1] * 14]
    assert bytes_at("v41_fp4", row[:512], 262, 263) == [0b0_0111_000]


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 2**32), size=SIZES)
def test_records_are_the_oracles_bytes(name, seed, size):
    rows = torch.randn(2, kv_cache.get_format(name).head_dim, generator=generator(seed)) * size
    for row, record in zip(rows.tolist(), kv_cache.quantize(rows, name), strict=True):
        assert bytes(record.tolist()) == ENCODE[name](row)


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 2**32))
def test_any_bytes_read_as_the_oracle_reads_them(name, seed):
    width = kv_cache.get_format(name).record_width
    record = torch.randint(0, 256, (width,), generator=generator(seed), dtype=torch.uint8)
    actual = kv_cache.dequantize(record, name, dtype=torch.float32)
    expected = torch.tensor(DECODE[name](bytes(record.tolist())))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_contiguous_with_any_page_stride(name):
    layout = kv_cache.get_format(name)
    rows = torch.randn(2, 5, 1, layout.head_dim, generator=generator(0))
    cache = kv_cache.pack(rows, name)
    assert cache.stride() == (5 * layout.record_width, layout.record_width, layout.record_width, 1)
    assert cache.view(-1, layout.record_width).equal(kv_cache.quantize(rows.view(10, -1), name))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_nonfinite_values_affect_only_their_block(name, number):
    block = 32 if name == "v41" else 16
    row = torch.randn(kv_cache.get_format(name).head_dim, generator=generator(0))
    clean = kv_cache.dequantize(kv_cache.quantize(row, name), name)
    row[70] = number
    spoilt = kv_cache.dequantize(kv_cache.quantize(row, name), name)
    begin = 70 // block * block
    assert spoilt[begin : begin + block].isnan().all()
    outside = torch.ones(len(row), dtype=torch.bool)
    outside[begin : begin + block] = False
    assert spoilt[outside].equal(clean[outside])


@pytest.mark.parametrize(("name", "share"), [("v41_fp4", 17 / 96), ("nvfp4_ds_mla", 3 / 16)])
@given(seed=st.integers(0, 2**32), exponent=st.floats(-14, 11.3))
def test_bounds_of_e2m1(name, share, seed, exponent):
    rows = torch.rand(64, 512, generator=generator(seed)).double() * 2 - 1
    rows = (rows * 2.0**exponent).float()
    padded = torch.nn.functional.pad(rows, (0, kv_cache.get_format(name).head_dim - 512))
    restored = kv_cache.dequantize(kv_cache.quantize(padded, name), name, dtype=torch.float32)[:, :512]
    off = (restored.double() - rows).abs().view(64, 32, 16).amax(dim=-1)
    amax = rows.double().abs().view(64, 32, 16).amax(dim=-1)
    # Of float32's quotient amax / 6 the last bit may be wrong.
    bound = torch.where(amax < 6 * 2.0**-6, 2.0**-6, amax * share) * (1 + 2.0**-22)
    assert (off <= bound).all()


@given(seed=st.integers(0, 2**32), exponent=st.floats(-30, 30))
def test_bounds_of_mxfp8(seed, exponent):
    rows = torch.randn(16, 512, generator=generator(seed)) * 2.0**exponent
    record = kv_cache.quantize(rows, "v41")
    scales = torch.exp2(record[:, 512:].double() - 127)
    amax = rows.view(16, 16, 32).abs().amax(dim=-1)
    assert ((scales < amax / 224) | (scales == 2.0**-13)).all()
    off = (kv_cache.dequantize(record, "v41", dtype=torch.float32).double() - rows).abs()
    bound = torch.maximum(rows.double().abs() * 2.0**-4, scales.repeat_interleave(32, dim=1) * 2.0**-10)
    assert (off <= bound).all()


@pytest.mark.parametrize("name", NAMES)
def test_scales_have_one_rounding(name):
    with pytest.raises(ValueError, match=f"^scale_rounding must be 'power_of_two' for format {name}, got 'exact'$"):
        kv_cache.quantize(torch.zeros(kv_cache.get_format(name).head_dim), name, scale_rounding="exact")


def test_only_v41_has_a_second_format():
    v41 = kv_cache.get_format("v41")
    assert v41.second_format(288).name == "v41_fp4"
    assert v41.second_format(528) is v41
    assert v41.second_format(584) is v41
    assert kv_cache.get_format("model1").second_format(288).name == "model1"
