"""TurboQuant records: bytes computed by hand and by an oracle in Python, and decoded values."""

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.turboquant_oracle import decode_record, encode_record, key_margin

from flashlatte.kv_cache import turboquant
from flashlatte.kv_cache.hadamard import hadamard

NAMES = turboquant.TURBOQUANT_NAMES


def encode(name, key, value):
    layout = turboquant.turboquant_format(name, len(key))
    return bytes(layout.encode(torch.tensor(key), torch.tensor(value)).tolist())


def test_widths():
    widths = [turboquant.turboquant_format(name, 128).record_bytes for name in NAMES]
    assert widths == [196, 134, 118, 102]


def test_four_bits_by_hand():
    # The key's rotation is ±1/4 in each of 16 places, as (-1)^(bits of the place in common with 5): 1 standard
    # deviation, which lies between the centroids 0.942 and 1.256, nearer to the first: codes 11 and 15 - 11 = 4.
    key = [0.0] * 16
    key[5] = 2.0
    # Steps of 1 from -1: 6.5 is 7.5 of them up, which rounds to 8.
    value = [-1.0, 14.0, 6.5] + [-1.0] * 13
    record = encode("turboquant_4bit_nc", key, value)
    signs = [11 if bin(place & 5).count("1") % 2 == 0 else 4 for place in range(16)]
    codes = bytes(signs[2 * i] | signs[2 * i + 1] << 4 for i in range(8))
    values = bytes([0xF0, 0x08, 0, 0, 0, 0, 0, 0])
    assert record == codes + struct.pack("<e", 2.0) + values + struct.pack("<ee", 1.0, -1.0)


def test_three_bits_by_hand():
    # Codes 0 to 7, twice: their 24 bits are 0b111_110_101_100_011_010_001_000.
    value = [float(number) for number in (0, 1, 2, 3, 4, 5, 6, 7)] * 2
    record = encode("turboquant_3bit_nc", [1.0] * 16, value)
    packed = (0b111110101100011010001000).to_bytes(3, "little")
    assert record[8:] == packed * 2 + struct.pack("<ee", 1.0, 0.0)
    # All of the key in the first place, 4 standard deviations up: code 7; elsewhere 0, which is given centroid 4.
    word = 7 | sum(4 << 3 * i for i in range(1, 8))
    rest = sum(4 << 3 * i for i in range(8))
    assert record[:8] == word.to_bytes(3, "little") + rest.to_bytes(3, "little") + struct.pack("<e", 4.0)


def test_e4m3_keys_by_hand():
    record = encode("turboquant_k8v4", [1.0, -2.0, 1000.0, 0.0] * 4, [3.0] * 16)
    assert record[:16] == bytes([0x38, 0xC0, 0x7E, 0x00] * 4)
    assert record[16:] == bytes(8) + struct.pack("<ee", 1e-8, 3.0)


@given(
    name=st.sampled_from(NAMES),
    head_dim=st.sampled_from([16, 32, 64]),
    magnitude=st.sampled_from([1e-3, 1.0, 300.0]),
    outliers=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_bytes_and_numbers_against_the_oracle(name, head_dim, magnitude, outliers, seed):
    generator = torch.Generator().manual_seed(seed)
    key, value = torch.randn(2, 3, head_dim, generator=generator) * magnitude
    if outliers:
        key[:, 3] *= 30
        value[1, 5] *= 100
    layout = turboquant.turboquant_format(name, head_dim)
    records = layout.encode(key, value)
    keys, values = layout.decode(records)
    for row in range(3):
        expected = encode_record(key[row].tolist(), value[row].tolist(), layout.key_bits, layout.value_bits)
        # A number within float32's rounding of a midpoint may be given either of two codes.
        if key_margin(key[row].tolist(), layout.key_bits) > 1e-6:
            assert bytes(records[row].tolist()) == expected
        wanted_key, wanted_value = decode_record(
            bytes(records[row].tolist()), head_dim, layout.key_bits, layout.value_bits
        )
        scale = max(map(abs, wanted_key))
        assert keys[row].tolist() == pytest.approx(wanted_key, rel=1e-5, abs=1e-5 * scale)
        assert values[row].tolist() == pytest.approx(wanted_value, rel=1e-6, abs=1e-6 * magnitude)


@pytest.mark.parametrize("name", NAMES)
def test_nan_infinity_and_values_that_saturate(name):
    layout = turboquant.turboquant_format(name, 16)
    key, value = torch.ones(4, 16), torch.arange(16.0).repeat(4, 1)
    for rows in (key, value):
        rows[0, 3] = math.nan
        rows[1, 2] = -math.inf
        rows[2] *= 1e6
    keys, values = layout.decode(layout.encode(key, value))
    assert values[:2].isnan().all()
    assert values[2].isfinite().all()
    assert keys[0].isnan().any()
    assert keys[2].isfinite().all()
    if layout.rotates:
        assert keys[:2].isnan().all()
    assert keys[3].isfinite().all()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "turboquant_k8v4"])
def test_decoded_keys_have_their_stored_norm(name):
    key = torch.randn(50, 128, generator=torch.Generator().manual_seed(0))
    layout = turboquant.turboquant_format(name, 128)
    read, _ = layout.decode(layout.encode(key, key))
    assert read.norm(dim=-1).tolist() == pytest.approx(key.norm(dim=-1).tolist(), rel=1e-3)
    assert (read - key).square().mean() < (0.012 if layout.key_bits == 4 else 0.04)


@pytest.mark.parametrize("name", NAMES)
def test_one_record_of_any_strides(name):
    layout = turboquant.turboquant_format(name, 16)
    key, value = torch.arange(16.0).expand(2, 1, 1, 16)
    record = layout.encode(key[:, :1].expand(1, 1, 16), value.as_strided((1, 1, 16), (3, 5, 1)))
    within = torch.zeros(3, 7, 61, dtype=torch.uint8)[1:2, 3:4, 5 : 5 + layout.record_bytes]
    within.copy_(record)
    for side, expected in zip(layout.decode(within), layout.decode(record), strict=True):
        assert side.equal(expected)


def test_allocated_heads_are_aligned_to_words():
    cache = turboquant.allocate("turboquant_4bit_nc", 3, 16, 2, 128)
    assert cache.shape == (3, 16, 2, 134)
    assert cache.stride() == (16 * 2 * 136, 2 * 136, 136, 1)
    assert turboquant.as_turboquant_cache(cache, None, 128).name == "turboquant_4bit_nc"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("turboquant_2bit", 1, 1, 1, 128), r"^cache_format must be one of turboquant_k8v4, .*, got 'turboquant_2bit'"),
        (("turboquant_k8v4", 1, 1, 1, 96), r"^head_dim must be a power of two from 16 to 512 .*, got 96$"),
        (("turboquant_k8v4", 1, 0, 1, 64), "^page_size must be at least 1, got 0$"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        turboquant.allocate(*arguments)


def test_a_cache_of_another_width_is_refused():
    with pytest.raises(ValueError, match=r"^cache must be 196 \(turboquant_k8v4\), .* wide for head dim 128, got 135$"):
        turboquant.as_turboquant_cache(torch.zeros(1, 1, 1, 135, dtype=torch.uint8), None, 128)
    with pytest.raises(ValueError, match=r"^cache of format turboquant_k8v4 must be 196 wide for .* 128, got 134$"):
        turboquant.as_turboquant_cache(torch.zeros(1, 1, 1, 134, dtype=torch.uint8), "turboquant_k8v4", 128)


def test_results_do_not_depend_on_the_default_dtype():
    layout = turboquant.turboquant_format("turboquant_3bit_nc", 32)
    rows = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    records = layout.encode(*rows)
    restored = layout.decode(records)
    hadamard.cache_clear()
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        assert layout.encode(*rows).equal(records)
        assert all(map(torch.equal, layout.decode(records), restored))
    finally:
        torch.set_default_dtype(before)
