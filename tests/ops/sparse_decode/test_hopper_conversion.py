"""The Hopper kernel's e4m3 to bf16, instruction by instruction."""

from __future__ import annotations

import re

import pytest
import torch

from flashlatte import dispatch

pytest.importorskip("triton")

from flashlatte.ops.sparse_decode.hopper import conversion

pytestmark = pytest.mark.skipif(dispatch.interpreting(), reason="Gluon is not interpreted")


def run(ptx: str, word: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Results $0 and $1 of ``ptx`` for operands $2 and $3, 32-bit words in int64."""
    registers = {"$2": word, "$3": factor}

    def value(operand: str) -> torch.Tensor:
        if operand in registers:
            return registers[operand]
        return torch.full_like(word, int(operand, 0))

    for line in ptx.strip("{} \n").splitlines():
        instruction, *operands = re.split(r"[\s,]+", line.strip().rstrip(";"))
        if instruction == ".reg":
            continue
        target, *sources = operands[0], *map(value, operands[1:])
        name = instruction.split(".")[0]
        if name == "mov":
            result = sources[0]
        elif name == "shr":
            result = sources[0] >> sources[1]
        elif name == "shl":
            result = (sources[0] << sources[1]) & 0xFFFFFFFF
        elif name == "and":
            result = sources[0] & sources[1]
        elif name == "add":
            result = (sources[0] + sources[1]) & 0xFFFFFFFF
        elif name == "lop3":
            result = lop3(sources[0], sources[1], sources[2], int(operands[-1], 0))
        elif name == "prmt":
            result = prmt(sources[0], sources[1], int(operands[-1], 0))
        else:
            assert instruction == "mul.rn.bf16x2", instruction
            halves = [numbers(sources[0], i) * numbers(sources[1], i) for i in range(2)]
            result = bits(halves[0]) | bits(halves[1]) << 16
        registers[target] = result
    return registers["$0"], registers["$1"]


def lop3(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, table: int) -> torch.Tensor:
    """Bit by bit, the entry of ``table`` at a, b, c."""
    result = torch.zeros_like(a)
    for entry in range(8):
        if table >> entry & 1:
            chosen = [x if entry >> bit & 1 else x ^ 0xFFFFFFFF for x, bit in ((a, 2), (b, 1), (c, 0))]
            result |= chosen[0] & chosen[1] & chosen[2]
    return result


def prmt(a: torch.Tensor, b: torch.Tensor, selector: int) -> torch.Tensor:
    """Four of eight bytes; those whose place has bit 3 set give their sign, eight times."""
    result = torch.zeros_like(a)
    for i in range(4):
        place = selector >> 4 * i & 15
        byte = ((a | b << 32) >> 8 * (place & 7)) & 255
        result |= (torch.where(byte > 127, 255, 0) if place & 8 else byte) << 8 * i
    return result


def numbers(word: torch.Tensor, half: int) -> torch.Tensor:
    return ((word >> 16 * half) & 0xFFFF).to(torch.uint16).view(torch.bfloat16)


def bits(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.view(torch.uint16).long()


@pytest.mark.parametrize("scale", [1.0, -0.75, 2.0**-13, 0.0123, 300.0, 2.0**100, 3.3895313892515355e38, 0.0])
def test_numbers_are_rounded_once_after_their_scale(scale: float) -> None:
    codes = torch.arange(256, dtype=torch.int64)
    codes = codes[(codes & 0x7F) != 0x7F]  # NaN
    shuffled = [codes.roll(shift) for shift in (0, 1, 77, 130)]
    word = torch.stack([code << 8 * i for i, code in enumerate(shuffled)]).sum(0)
    rounded = torch.tensor(scale).bfloat16()
    factor = bits(rounded.expand(codes.shape).contiguous())
    low, high = run(conversion._WIDEN.value, word, factor | factor << 16)

    results = [numbers(low, 0), numbers(low, 1), numbers(high, 0), numbers(high, 1)]
    for code, result in zip(shuffled, results, strict=True):
        exact = code.to(torch.uint8).view(torch.float8_e4m3fn).double() * rounded.double()
        assert torch.equal(result, exact.float().bfloat16())
        assert torch.equal(result.signbit(), exact.signbit())


def test_exponents_become_scales() -> None:
    exponents = torch.arange(256, dtype=torch.int64)
    shuffled = [exponents.roll(shift) for shift in (0, 1, 77, 130)]
    word = torch.stack([exponent << 8 * i for i, exponent in enumerate(shuffled)]).sum(0)
    low, high = run(conversion._SPLIT.value, word, word)
    for number, exponent in enumerate(shuffled):
        pair = prmt(low, high, number * 0x1111 + 0x4040)
        exact = torch.where(exponent == 255, torch.nan, torch.exp2(exponent.double() - 127))
        for half in range(2):
            torch.testing.assert_close(numbers(pair, half).double(), exact, rtol=0, atol=0, equal_nan=True)
