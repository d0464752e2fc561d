"""Models whose projections are transformers' ``FP8Linear``, on a CPU.

Its kernels need a GPU: a product with the dequantised weight stands for them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

BLOCK = 16


def install(monkeypatch: Any) -> None:
    from transformers.integrations import finegrained_fp8

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, dense(self).to(x.dtype))

    def grouped_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        weight = dense(self).to(x.dtype).unflatten(0, (self.n_groups, -1))
        return torch.einsum("...gi,goi->...go", x, weight)

    monkeypatch.setattr(finegrained_fp8.FP8Linear, "forward", forward)
    monkeypatch.setattr(finegrained_fp8.FP8GroupedLinear, "forward", grouped_forward)


def quantised(model: Any, *, in_blocks: bool = True) -> Any:
    """The model, whose attentions' linear layers are quantised from now on."""
    from transformers.integrations.finegrained_fp8 import FP8GroupedLinear, FP8Linear

    block = (BLOCK, BLOCK) if in_blocks else None
    for name, module in list(model.named_modules()):
        # transformers keeps an indexer's head weights in float32.
        if ".self_attn." not in name or not isinstance(module, nn.Linear) or name.endswith("weights_proj"):
            continue
        sizes, groups = (module.in_features, module.out_features), getattr(module, "n_groups", None)
        made: Any = FP8Linear(*sizes, block) if groups is None else FP8GroupedLinear(*sizes, groups, block)
        weight = module.weight.detach()
        padded = nn.functional.pad(weight, (0, -weight.shape[1] % BLOCK, 0, -weight.shape[0] % BLOCK))
        blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)) if in_blocks else padded[None, :, None]
        scales = blocks.abs().amax((1, 3)) / 448
        codes = (blocks / scales[:, None, :, None]).reshape(padded.shape)[: weight.shape[0], : weight.shape[1]]
        made.weight = nn.Parameter(codes.to(torch.float8_e4m3fn), requires_grad=False)
        scales = scales if in_blocks else scales.squeeze()
        made.weight_scale_inv = nn.Parameter(scales, requires_grad=False)
        model.set_submodule(name, made)
    return model


def dense(module: Any) -> torch.Tensor:
    """float32, number by number."""
    rows, columns = module.weight.shape
    if module.block_size is None:
        return module.weight.float() * module.weight_scale_inv
    row, column = torch.arange(rows)[:, None] // BLOCK, torch.arange(columns) // BLOCK
    return module.weight.float() * module.weight_scale_inv.float()[row, column]
