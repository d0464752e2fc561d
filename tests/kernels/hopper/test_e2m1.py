"""Dequantization of e2m1 to bf16 in the Hopper kernels, emulated instruction by instruction."""

from __future__ import annotations

import pytest
import torch
from support.ptx import numbers, run

from flashlatte import kv_cache
from flashlatte.runtime import machine

pytest.importorskip("triton")

from flashlatte.kernels.hopper.ptx import e2m1

pytestmark = pytest.mark.skipif(machine.interpreting(), reason="Gluon is not interpreted")


@pytest.mark.parametrize("number", range(4))
def test_every_value_of_every_scale_is_exact(number: int) -> None:
    """Each of a word's eight positions has all 16 codes, with each of the 256 scales."""
    scale, code = torch.cartesian_prod(torch.arange(256), torch.arange(16)).unbind(1)
    codes = [(code * multiplier + shift) & 15 for multiplier, shift in ((1, 0), (3, 7), (5, 1), (15, 9))] * 2
    codes[5] = codes[5] ^ 8
    word = torch.stack([one << 4 * i for i, one in enumerate(codes)]).sum(0)
    others = (scale * 77 + 13) & 255
    scales = torch.stack([(scale if i == number else others) << 8 * i for i in range(4)]).sum(0)

    factor = run(e2m1._FACTOR.value, {"$1": scales, "$2": torch.full_like(scales, number * 0x11)})["$0"]
    pairs = run(str(e2m1._dequantize_asm()), {"$4": word, "$5": factor})
    values = torch.stack([numbers(pairs[f"${i}"], half) for i in range(4) for half in range(2)], dim=1)

    # A row of the format has 64 words, and each scale is for two of them.
    bytes_of_word = torch.stack([(word >> 8 * i) & 255 for i in range(4)], dim=1).to(torch.uint8)
    records = torch.cat((bytes_of_word.repeat(1, 64), scale.to(torch.uint8)[:, None].expand(-1, 32)), dim=1)
    exact = kv_cache.dequantize(records, "v41_fp4", dtype=torch.float32)[:, :8]
    torch.testing.assert_close(values.float(), exact, rtol=0, atol=0, equal_nan=True)
    finite = ~exact.isnan()
    assert torch.equal(values.signbit()[finite], exact.signbit()[finite])
    assert torch.equal(exact.isnan().all(dim=1), (scale & 0x7F) == 0x7F)
