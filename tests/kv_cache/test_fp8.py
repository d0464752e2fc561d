import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashlatte.kv_cache import fp8
from flashlatte.testing import byte_oracles

HALF_ULP = 2.0**-4  # three mantissa bits: neighbors are at most 2^-3 of a value apart
HALF_SUBNORMAL_STEP = 2.0**-10


def same_or_both_nan(actual, expected):
    return actual == expected or (math.isnan(actual) and math.isnan(expected))


def test_every_e4m3_byte_reads_as_its_value():
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist()
    assert all(map(same_or_both_nan, values, byte_oracles.E4M3_VALUES))


def test_every_e8m0_byte_reads_as_its_power_of_two():
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu).double().tolist()
    assert all(map(same_or_both_nan, values, [byte_oracles.e8m0_decode(byte) for byte in range(256)]))


def test_the_cast_of_every_bf16_number_saturates_and_rounds_to_even():
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16).float()
    actual = fp8.to_e4m3(x).view(torch.uint8).tolist()
    for value, byte in zip(x.tolist(), actual, strict=True):
        if math.isnan(value):
            assert byte & 0x7F == 0x7F
        else:
            assert byte == byte_oracles.e4m3_encode(value), value


@given(st.floats(min_value=2.0**-125, max_value=2.0**126, width=32))
def test_round_up_to_power_of_two(x):
    rounded = fp8.round_up_to_power_of_two(torch.tensor([x])).item()
    assert math.frexp(rounded)[0] == 0.5
    assert x <= rounded < 2 * x


def test_round_up_keeps_powers_of_two_and_nonfinite_values():
    x = torch.tensor([2.0**e for e in range(-126, 128)] + [math.inf])
    assert fp8.round_up_to_power_of_two(x).equal(x)
    assert fp8.round_up_to_power_of_two(torch.tensor([math.nan])).isnan().all()


@pytest.mark.parametrize("scale_rounding", fp8.SCALE_ROUNDINGS)
@pytest.mark.parametrize("tile", [64, 128])
@given(seed=st.integers(0, 2**32), size=st.sampled_from([1e-6, 1e-2, 1.0, 300.0]))
def test_error_is_half_a_step_of_e4m3_at_the_scale(tile, scale_rounding, seed, size):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 3 * tile, generator=generator) * size * torch.rand(4, 3 * tile, generator=generator) ** 8
    values, scales = fp8.quantize_tiles(x, tile, scale_rounding)
    restored = fp8.dequantize_tiles(values, scales, tile)

    amax = x.unflatten(-1, (3, tile)).abs().amax(-1)
    float32_noise = 1 + 2.0**-21
    assert (scales * float32_noise >= amax / 448).all()
    if scale_rounding == "power_of_two":
        assert ((scales < 2 * amax / 448) | (scales == 2.0**-13)).all()
    else:
        torch.testing.assert_close(scales, amax / 448)
    floor = HALF_SUBNORMAL_STEP * scales.repeat_interleave(tile, -1)
    allowed = torch.maximum(HALF_ULP * x.abs(), floor) * float32_noise
    assert ((restored - x).abs() <= allowed).all()


@pytest.mark.parametrize("scale_rounding", fp8.SCALE_ROUNDINGS)
def test_a_tile_of_zeros_has_a_finite_scale(scale_rounding):
    values, scales = fp8.quantize_tiles(torch.zeros(1, 128), 128, scale_rounding)
    assert scales.isfinite().all()
    assert (scales > 0).all()
    assert fp8.dequantize_tiles(values, scales, 128).eq(0).all()


@pytest.mark.parametrize("scale_rounding", fp8.SCALE_ROUNDINGS)
def test_a_nan_makes_its_own_tile_nan(scale_rounding):
    x = torch.ones(1, 256)
    x[0, 130] = torch.nan
    values, scales = fp8.quantize_tiles(x, 128, scale_rounding)
    assert scales.isnan().tolist() == [[False, True]]
    restored = fp8.dequantize_tiles(values, scales, 128)
    assert restored[0, 128:].isnan().all()
    assert restored[0, :128].eq(1).all() or scale_rounding == "exact"
