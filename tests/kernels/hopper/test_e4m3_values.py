"""Values of e4m3 as the left operand of a transposed product, emulated instruction by instruction."""

from __future__ import annotations

import pytest
import torch

from flashlatte.runtime import machine

pytest.importorskip("triton")

from support import e4m3_values

pytestmark = pytest.mark.skipif(machine.interpreting(), reason="Gluon is not interpreted")


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("number", range(4))
def test_order_of_keys_and_columns(side: int, number: int) -> None:
    tile = torch.randint(256, (64, 512), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    operand = e4m3_values.load_columns(e4m3_values.swizzled(tile), side * 64 * 256, number)
    keys = torch.arange(64).reshape(4, 2, 4, 2).permute(0, 2, 1, 3).flatten()
    columns = torch.arange(64).reshape(4, 8, 2).permute(0, 2, 1).flatten()
    expected = tile[keys][:, side * 256 + number * 64 + columns].T
    assert torch.equal(operand, expected)
