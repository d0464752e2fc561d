"""The PTX that converts bytes to operands, instruction by instruction, and the resulting order of dims."""

from __future__ import annotations

import pytest
import torch
from support.ptx import numbers, run

from flashlatte.runtime import machine

pytest.importorskip("triton")

from flashlatte.ops.paged_attention.portable import byte_operands
from flashlatte.ops.paged_attention.portable.keys import E4M3, E5M2, INT8

pytestmark = pytest.mark.skipif(machine.interpreting(), reason="runs no kernel")
KINDS = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2, INT8: torch.int8}


def words_of_all_bytes() -> torch.Tensor:
    """int64 [256]: words with each byte value once at each of four positions."""
    byte = torch.arange(256)
    return byte | (byte + 1) % 256 << 8 | (byte + 77) % 256 << 16 | (byte + 200) % 256 << 24


def number(word: torch.Tensor, place: int, kind: int) -> torch.Tensor:
    return (word >> 8 * place & 255).to(torch.uint8).view(KINDS[kind]).half()


def assert_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_word_becomes_four_numbers(kind: int):
    word = words_of_all_bytes()
    registers = run(byte_operands._word_text(kind), {"$4": word})
    for place in range(4):
        assert_equal(numbers(registers[f"${place}"], 0, torch.float16), number(word, place, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_two_words_become_pairs(kind: int):
    first = words_of_all_bytes()
    second = first.flip(0)
    registers = run(byte_operands._two_words_text(kind), {"$4": first, "$5": second})
    for place in range(4):
        for half, word in enumerate((first, second)):
            assert_equal(numbers(registers[f"${place}"], half, torch.float16), number(word, place, kind))
