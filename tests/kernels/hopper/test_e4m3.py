"""Dequantization of e4m3 to bf16 in the Hopper kernels, emulated instruction by instruction."""

from __future__ import annotations

import pytest
import torch
from support.ptx import bits, numbers, prmt, run

from flashlatte.runtime import machine

pytest.importorskip("triton")

from triton.experimental.gluon import language as gl

from flashlatte.kernels.hopper.ptx import e4m3

pytestmark = pytest.mark.skipif(machine.interpreting(), reason="Gluon is not interpreted")


def is_nan(code: torch.Tensor) -> torch.Tensor:
    return (code & 0x7F) == 0x7F


@pytest.mark.parametrize("scale", [1.0, -0.75, 2.0**-13, 0.0123, 300.0, 2.0**100, 3.3895313892515355e38, 0.0])
def test_dequantize_rounds_once_after_the_scale(scale: float) -> None:
    codes = torch.arange(256, dtype=torch.int64)
    codes = codes[~is_nan(codes)]
    shuffled = [codes.roll(shift) for shift in (0, 1, 77, 130)]
    word = torch.stack([code << 8 * i for i, code in enumerate(shuffled)]).sum(0)
    rounded = torch.tensor(scale).bfloat16()
    factor = bits(rounded.expand(codes.shape).contiguous())
    pairs = run(e4m3._DEQUANTIZE.value, {"$2": word, "$3": factor | factor << 16})
    low, high = pairs["$0"], pairs["$1"]

    results = [numbers(low, 0), numbers(low, 1), numbers(high, 0), numbers(high, 1)]
    for code, result in zip(shuffled, results, strict=True):
        exact = code.to(torch.uint8).view(torch.float8_e4m3fn).double() * rounded.double()
        assert torch.equal(result, exact.float().bfloat16())
        assert torch.equal(result.signbit(), exact.signbit())


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, gl.bfloat16), (torch.float16, gl.float16)], ids=str)
def test_expand_is_exact(dtype: torch.dtype, name: gl.dtype) -> None:
    codes = torch.arange(256, dtype=torch.int64)
    shuffled = [codes.roll(shift) for shift in (0, 1, 77, 130)]
    word = torch.stack([code << 8 * i for i, code in enumerate(shuffled)]).sum(0)

    def expanded(factor: int) -> list[torch.Tensor]:
        pairs = run(str(e4m3._expand_asm(name)), {"$2": word, "$3": torch.full_like(word, factor)})
        return [numbers(pairs[register], half, dtype) for register in ("$0", "$1") for half in range(2)]

    for code, result in zip(shuffled, expanded(int(e4m3.exact_factor(name))), strict=True):
        exact = code.to(torch.uint8).view(torch.float8_e4m3fn).to(dtype)
        assert torch.equal(result[~is_nan(code)], exact[~is_nan(code)])
        assert torch.equal(result.signbit()[~is_nan(code)], exact.signbit()[~is_nan(code)])
    assert torch.stack(expanded(int(e4m3.nan_factor(name)))).isnan().all()
    assert not torch.stack(expanded(0)).any()


def test_exponents_to_scales() -> None:
    exponents = torch.arange(256, dtype=torch.int64)
    shuffled = [exponents.roll(shift) for shift in (0, 1, 77, 130)]
    word = torch.stack([exponent << 8 * i for i, exponent in enumerate(shuffled)]).sum(0)
    split = run(e4m3._SPLIT.value, {"$2": word})
    low, high = split["$0"], split["$1"]
    for number, exponent in enumerate(shuffled):
        pair = prmt(low, high, number * 0x1111 + 0x4040)
        exact = torch.where(exponent == 255, torch.nan, torch.exp2(exponent.double() - 127))
        for half in range(2):
            torch.testing.assert_close(numbers(pair, half).double(), exact, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("in_second_word", [False, True])
def test_has_nan_with_any_other_values(place: int, in_second_word: bool) -> None:
    codes = torch.arange(256, dtype=torch.int64)
    code, others = torch.cartesian_prod(codes, codes).unbind(1)
    word = torch.stack([(code if i == place else others) << 8 * i for i in range(4)]).sum(0)
    second = others * 0x01010101
    words = (second, word) if in_second_word else (word, second)
    found = run(str(e4m3._find_nan_asm(2, 2)), {"$2": words[0], "$3": words[1]})
    assert torch.equal(found["$0"] & (e4m3._SIGNS.value & 0xFFFFFFFF) != 0, is_nan(code) | is_nan(others))
    assert not found["$1"].any()
