"""Codes as GPUs find them, by the midpoint that another lane holds: those of the codebook, but for rounding."""

import pytest
import torch

from flashlatte.kv_cache.lloyd_max import midpoints
from flashlatte.runtime import machine

pytest.importorskip("triton")

from flashlatte.ops.turboquant_store.portable import codes

pytestmark = pytest.mark.skipif(machine.interpreting(), reason="runs no kernel")


def floats(words):
    return torch.tensor([word - (word >> 31 << 32) for word in words], dtype=torch.int32).view(torch.float32)


@pytest.mark.parametrize("bits", [3, 4])
def test_a_lane_has_one_midpoint_and_the_code_below_it(bits):
    table, exact = codes.lane_table(bits), torch.tensor(midpoints(bits), dtype=torch.float64)
    held = floats(table)
    is_one = held < 1
    assert is_one.sum() == len(exact)
    found = (held[is_one].double() - floats([codes._CENTRE[bits]]).double()) / codes._SLOPE[bits]
    assert (found - exact).abs().max() < 7e-7
    below = torch.tensor([word & 15 for word in table])
    assert below[is_one].equal(torch.arange(len(exact)))


@pytest.mark.parametrize("bits", [3, 4])
def test_codes_are_those_of_the_codebook(bits):
    exact = torch.tensor(midpoints(bits), dtype=torch.float64)
    generator = torch.Generator().manual_seed(bits)
    beside = (exact[:, None] + torch.linspace(-1e-5, 1e-5, 201, dtype=torch.float64)).flatten()
    edges = (torch.arange(31) + 0.5) / 31 - 0.5
    lanes = (edges[:, None].double() / codes._SLOPE[bits] + torch.linspace(-1e-6, 1e-6, 41)).flatten()
    x = torch.cat((torch.randn(200_000, generator=generator).double(), beside, lanes, torch.tensor([-30.0, 0.0, 30.0])))
    # float64 holds a product of two float32, and what is added to it.
    slope, centre = torch.tensor(codes._SLOPE[bits]).double(), floats([codes._CENTRE[bits]]).double()
    z = (x.float().double() * slope + centre).float().clamp(0, 1)
    lane = (z.double() * 31 + 2.0**23).float().view(torch.int32) & 31
    held = torch.tensor(codes.lane_table(bits))[lane]
    found = (held & 15) + (z >= floats(held.tolist()))
    margin = (x[:, None] - exact).abs().amin(dim=1)
    wanted = torch.bucketize(x, exact, right=True)
    assert found[margin > 1e-6].equal(wanted[margin > 1e-6])
    assert ((found - wanted).abs() <= 1).all()
