from __future__ import annotations

import torch

from flashlatte.layers.v4.hyper_connection import split_into_bf16


def test_parts_add_up_to_their_weight():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(24, 40, generator=generator) * 10.0 ** torch.randint(-6, 6, (24, 40), generator=generator)
    parts = split_into_bf16(weight)
    assert parts.dtype == torch.bfloat16
    assert parts.shape == (72, 40)
    assert parts.view(3, 24, 40).double().sum(dim=0).float().equal(weight)
