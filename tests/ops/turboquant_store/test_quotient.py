"""The kernel's quotient as computed on GPUs, from a reciprocal and FMAs, gives the codes of a division."""

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from flashlatte.ops.turboquant_store.portable import codes
from flashlatte.runtime import machine

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(not machine.interpreting(), reason="an emulator stands for fused products"),
]
ROWS, COLUMNS = 64, 64


@triton.jit
def quotient_kernel(x, scale, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.arange(0, ROWS)[:, None]
    place = row * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(out + place, codes.quotient(tl.load(x + place), tl.load(scale + row)))


def steps_and_scales():
    """Scales of rows in bf16, in float32, and next to powers of two; values at and next to rounding boundaries."""
    generator = torch.Generator().manual_seed(0)
    random = torch.rand(ROWS, generator=generator) * 4 + 1e-3
    near_one = torch.tensor(1.0).view(torch.int32) + torch.arange(-8, 8, dtype=torch.int32)
    random[:16] = near_one.view(torch.float32)
    random[16:32] = random[16:32].bfloat16().float() / 15
    random[32:36] = torch.tensor([1e-8, 1e30, 2e37, 2.0**-20])
    scale = random[:, None]
    half_steps = (torch.arange(COLUMNS) // 4 + 0.5)[None, :] * scale
    moved = half_steps.view(torch.int32) + (torch.arange(COLUMNS, dtype=torch.int32) % 4 - 1)
    return moved.view(torch.float32), scale


def test_the_quotient_is_the_divisions(monkeypatch):
    x, scale = steps_and_scales()

    def fma(a, b, c):
        # 64 bits hold a product of two float32, and what is left of a third.
        shape = np.broadcast_shapes(*(one.handle.data.shape for one in (a, b, c)))
        exact = [one.handle.data.astype(np.longdouble) for one in (a, b, c)]
        data = np.broadcast_to((exact[0] * exact[1] + exact[2]).astype(np.float32), shape)
        return tl.tensor(TensorHandle(data.copy(), tl.float32), tl.block_type(tl.float32, list(shape)))

    monkeypatch.setattr(tl, "fma", fma)
    monkeypatch.setattr(codes, "INTERPRETED", False)
    out = torch.empty_like(x)
    launch: Any = quotient_kernel[(1,)]
    launch(x, scale.contiguous(), out, ROWS, COLUMNS)
    assert (out + 0.5).floor().equal((x / scale + 0.5).floor())
    ones = scale[:, 0].view(torch.int32) & 0x7FFFFF == 0x7FFFFF
    assert ones.sum() == 1
    assert out[~ones].equal((x / scale)[~ones])
