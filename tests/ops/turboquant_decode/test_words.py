"""The PTX that unpacks codes, instruction by instruction, and the order in which dims come out."""

import pytest
import torch
from support.ptx import numbers, run

from flashlatte.runtime import machine

pytest.importorskip("triton")

from flashlatte.ops.turboquant_decode.portable import words
from flashlatte.testing.turboquant_oracle import centroids

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
    text = (words._FOUR_BITS if bits == 4 else words._THREE_BITS).value
    registers = run(text, {"$8": word})
    table = torch.tensor(centroids(bits)).half()
    for place in range(8):
        assert halves(registers[f"${place}"]).equal(table[word >> 4 * place & 15])


def test_e4m3_becomes_fp16():
    word = some_words(1000)
    registers = run(words._E4M3.value, {"$4": word})
    for place in range(4):
        exact = (word >> 8 * place & 255).to(torch.uint8).view(torch.float8_e4m3fn).half()
        torch.testing.assert_close(halves(registers[f"${place}"]), exact, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("text", "centre"), [(words._STEPS_FROM_4, 4), (words._STEPS_FROM_8, 8)])
def test_codes_become_steps_of_two_keys(text, centre):
    first, second = some_words(2000).chunk(2)
    registers = run(text.value, {"$8": first, "$9": second})
    for place in range(8):
        for half, word in enumerate((first, second)):
            exact = (word >> 4 * place & 15) - centre
            assert numbers(registers[f"${place}"], half).equal(exact.bfloat16())
