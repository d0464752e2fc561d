"""What one stream computes and the library caches is complete when another stream reads it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from flashlatte.layers import rope
from flashlatte.layers.quantized import dequantized_weight
from flashlatte.layers.rope_config import Rope

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
# Clock cycles, about half a second, by which the first stream is late.
CYCLES = 10**9


class BlockScaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(256, 256, generator=generator).to(torch.float8_e4m3fn)
        self.weight = nn.Parameter(weight.to(DEVICE), requires_grad=False)
        self.weight_scale_inv = nn.Parameter(torch.rand(2, 2, generator=generator).to(DEVICE), requires_grad=False)
        self.block_size = (128, 128)


def on_two_streams(compute: Callable[[], torch.Tensor]) -> torch.Tensor:
    """A copy, on a second stream, of what the first stream computes behind other work."""
    torch.empty(2**24, device=DEVICE).fill_(float("nan"))  # what memory may hold before
    torch.cuda.synchronize()
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(first):
        torch.cuda._sleep(CYCLES)
        compute()
    with torch.cuda.stream(second):
        copy = compute().clone()
    torch.cuda.synchronize()
    return copy


def test_dequantized_weights():
    module = BlockScaled()
    expected = dequantized_weight(BlockScaled(), torch.bfloat16)
    assert torch.equal(on_two_streams(lambda: dequantized_weight(module, torch.bfloat16)), expected)


def test_rotary_tables():
    number = rope.table_id(Rope(theta=12345.0, max_position=777), 64)
    for read in (rope.rotary_table, rope.inverse_table):
        expected = read(number, torch.device("cpu")).to(DEVICE)
        assert torch.equal(on_two_streams(lambda read=read: read(number, DEVICE)), expected)
    expected = rope.unrotated_table(62, torch.device("cpu")).to(DEVICE)
    assert torch.equal(on_two_streams(lambda: rope.unrotated_table(62, DEVICE)), expected)


def test_a_weight_dequantized_during_capture_is_not_cached():
    module = BlockScaled()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = dequantized_weight(module, torch.bfloat16)
    eager = dequantized_weight(module, torch.bfloat16)
    assert eager is not captured
    graph.replay()
    assert torch.equal(eager, captured)
