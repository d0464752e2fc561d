"""The PTX that unpacks codes, instruction by instruction, and the resulting order of dims."""

import pytest
import torch
from support.ptx import numbers, run

from flashlatte.runtime import machine

pytest.importorskip("triton")

from support.turboquant_oracle import centroids

from flashlatte.ops.turboquant_decode.portable import words

pytestmark = pytest.mark.skipif(machine.interpreting(), reason="runs no kernel")


def some_words(count):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 2**32, (count,), generator=generator)


def halves(register):
    return register.to(torch.uint16).view(torch.float16)


@pytest.mark.parametrize("bits", [3, 4])
def test_codes_become_the_nearest_fp16_of_their_centroids(bits):
    word = some_words(1000)
    if bits == 3:
        word &= 0x77777777
    kept = (words._KEPT_4 if bits == 4 else words._KEPT_3).value
    text = (words._FOUR_BITS if bits == 4 else words._THREE_BITS).value
    lanes = torch.arange(len(word)) % 32
    registers = run(text, run(kept, {"$1": lanes * 0 + 7, "%laneid": lanes}) | {"$12": word})
    table = torch.tensor(centroids(bits)).half()
    found = torch.stack([halves(registers[f"${place}"]) for place in range(8)], dim=-1)
    codes = word[:, None] >> 4 * torch.arange(8) & 15
    assert found.equal(table[codes])
    squares = torch.stack([halves(registers[f"${place}"]) for place in range(8, 12)], dim=-1)
    for half in (0, 1):
        pairs = found[:, 4 * half : 4 * half + 4].double().square().unflatten(1, (2, 2)).sum(dim=1)
        torch.testing.assert_close(squares[:, 2 * half : 2 * half + 2].double(), pairs, rtol=2**-10, atol=0)


def test_e4m3_becomes_fp16():
    word = some_words(1000)
    registers = run(words._E4M3.value, {"$4": word})
    for place in range(4):
        exact = (word >> 8 * place & 255).to(torch.uint8).view(torch.float8_e4m3fn).half()
        torch.testing.assert_close(halves(registers[f"${place}"]), exact, rtol=0, atol=0, equal_nan=True)


def test_codes_become_the_last_bits_of_two_keys():
    first, second = some_words(2000).chunk(2)
    registers = run(words._STEPS.value, {"$8": first, "$9": second})
    for place in range(8):
        for half, word in enumerate((first, second)):
            exact = (word >> 4 * place & 15) * 2.0 ** (-20 if place % 2 else -24)
            assert numbers(registers[f"${place}"], half, torch.float16).double().equal(exact.double())
