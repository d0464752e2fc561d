"""One rank's slices of 4-bit experts, compared with the same slices of the dequantized experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed.model.test_checkpoint import ranks
from torch import nn

from flashlatte.distributed.model.partition import check_divisible
from flashlatte.distributed.model.shards import divide_mlp

EXPERTS, HIDDEN, INNER = 2, 64, 128


class Experts(nn.Module):
    """The weights of transformers' ``FP8Experts`` for a checkpoint with 4-bit experts."""

    def __init__(self) -> None:
        super().__init__()
        self.block_size, self.intermediate_dim = (32, 32), INNER
        for name, outputs, inputs in (("gate_up_proj", 2 * INNER, HIDDEN), ("down_proj", HIDDEN, INNER)):
            codes = torch.randint(-128, 128, (EXPERTS, outputs, inputs // 2), dtype=torch.int8)
            scales = torch.rand(EXPERTS, outputs, inputs // 32).to(torch.float8_e8m0fnu)
            self.register_parameter(name, nn.Parameter(codes, requires_grad=False))
            self.register_parameter(f"{name}_scale_inv", nn.Parameter(scales, requires_grad=False))


def numbers(experts: Any, name: str) -> torch.Tensor:
    """Dequantized weights [experts, outputs, inputs]."""
    codes, scales = getattr(experts, name).int(), getattr(experts, f"{name}_scale_inv").float()
    pairs = torch.stack([codes & 15, (codes >> 4) & 15], dim=-1).flatten(2)
    return pairs.float() * scales.repeat_interleave(32, -1)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_experts_of_four_bits(size):
    torch.manual_seed(size)
    whole = nn.ModuleDict({"experts": Experts()})
    check_divisible(whole)
    gate, up = numbers(whole["experts"], "gate_up_proj").chunk(2, dim=1)
    down = numbers(whole["experts"], "down_proj")
    first = 0
    for rank in range(size):
        torch.manual_seed(size)
        part = nn.ModuleDict({"experts": Experts()})
        divide_mlp(part, ranks(rank, size))
        cut: Any = part["experts"]
        end = first + cut.intermediate_dim
        assert torch.cat((gate[:, first:end], up[:, first:end]), 1).equal(numbers(cut, "gate_up_proj"))
        assert down[:, :, first:end].equal(numbers(cut, "down_proj"))
        first = end
    assert first == INNER


def test_blocks_of_four_bits_are_not_split():
    message = r"at multiples of their block size 32, got 0 to 16 of 128 in a Experts$"
    with pytest.raises(ValueError, match=message):
        divide_mlp(nn.ModuleDict({"experts": Experts()}), ranks(0, 8))
