"""Models whose projections are transformers' ``FP8Linear``, on a CPU, and checkpoints of such weights.

Its kernels need a GPU and are replaced by a product with the dequantized weight.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

BLOCK = 16
# Modules of a checkpoint that are not quantized, including DeepSeek-V4's compressors and hyper-connections.
_PLAIN = ("embed", "head", ".gate.", "weights_proj", "compressor.", ".ape", "hc_")
# Changes to the models of tests/support/engine_models.py: whole blocks for every head.
SIZES = {"q_lora_rank": 32, "qk_rope_head_dim": 16, "v_head_dim": 16}


def install(monkeypatch: Any) -> None:
    from transformers.integrations import finegrained_fp8

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, dense(self).to(x.dtype))

    def grouped_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        weight = dense(self).to(x.dtype).unflatten(0, (self.n_groups, -1))
        return torch.einsum("...gi,goi->...go", x, weight)

    def experts_forward(self: Any, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        gate_up, down = (
            _times(getattr(self, name), getattr(self, f"{name}_scale_inv")).to(x.dtype)[chosen]
            for name in ("gate_up_proj", "down_proj")
        )  # [tokens, chosen, outputs, inputs]
        gate, up = torch.einsum("ti,tcoi->tco", x, gate_up).chunk(2, dim=-1)
        return torch.einsum("tci,tcoi,tc->to", self.act_fn(gate) * up, down, weights.to(x.dtype))

    experts = finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS
    monkeypatch.setitem(experts._global_mapping, "grouped_mm", experts_forward)
    monkeypatch.setattr(finegrained_fp8.FP8Linear, "forward", forward)
    monkeypatch.setattr(finegrained_fp8.FP8GroupedLinear, "forward", grouped_forward)


def quantized(model: Any, *, in_blocks: bool = True) -> Any:
    """``model``, with the linear layers of its attention quantized in place."""
    from transformers.integrations.finegrained_fp8 import FP8GroupedLinear, FP8Linear

    block = (BLOCK, BLOCK) if in_blocks else None
    for name, module in list(model.named_modules()):
        # transformers keeps an indexer's head weights in float32.
        if ".self_attn." not in name or not isinstance(module, nn.Linear) or name.endswith("weights_proj"):
            continue
        sizes, groups = (module.in_features, module.out_features), getattr(module, "n_groups", None)
        made: Any = FP8Linear(*sizes, block) if groups is None else FP8GroupedLinear(*sizes, groups, block)
        codes, scales = codes_and_scales(module.weight.detach(), in_blocks=in_blocks)
        made.weight = nn.Parameter(codes, requires_grad=False)
        made.weight_scale_inv = nn.Parameter(scales, requires_grad=False)
        model.set_submodule(name, made)
    return model


def save(model: Any, path: Path, *, scale_fmt: str | None = None, block: int = BLOCK) -> None:
    """Save a model in the format of DeepSeek's checkpoints, whose blocks are 128 x 128. With ``scale_fmt`` "ue8m0", as
    in V3.1, scales are powers of two."""
    from safetensors.torch import load_file, save_file

    model.save_pretrained(path)
    file, written = path / "model.safetensors", {}
    for name, weight in load_file(file).items():
        written[name] = weight
        if weight.dim() == 2 and not any(part in name for part in _PLAIN):
            written[name], scales = codes_and_scales(weight, block=block)
            scales = scales.float() if scale_fmt is None else scales.float().log2().ceil().exp2()
            written[f"{name}_scale_inv"] = scales
    save_file(written, file, {"format": "pt"})
    settings = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    settings |= {"weight_block_size": [block, block], **({} if scale_fmt is None else {"scale_fmt": scale_fmt})}
    config = json.loads((path / "config.json").read_text()) | {"quantization_config": settings}
    (path / "config.json").write_text(json.dumps(config))


def keep_quantized(monkeypatch: Any) -> None:
    """Make transformers keep such checkpoints quantized, as on a GPU that supports fp8 products."""
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    def keep(self: Any, **options: Any) -> None:
        self.quantization_config.dequantize = False

    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", keep)


def codes_and_scales(
    weight: torch.Tensor, *, in_blocks: bool = True, block: int = BLOCK
) -> tuple[torch.Tensor, torch.Tensor]:
    padded = nn.functional.pad(weight, (0, -weight.shape[1] % block, 0, -weight.shape[0] % block))
    blocks = padded.unflatten(1, (-1, block)).unflatten(0, (-1, block)) if in_blocks else padded[None, :, None]
    scales = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).reshape(padded.shape)[: weight.shape[0], : weight.shape[1]]
    return codes.to(torch.float8_e4m3fn), scales if in_blocks else scales.squeeze()


def dense(module: Any) -> torch.Tensor:
    """The dequantized weight, float32, computed element by element."""
    if module.block_size is None:
        return module.weight.float() * module.weight_scale_inv
    return _times(module.weight, module.weight_scale_inv)


def _times(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    row, column = (torch.arange(size) // BLOCK for size in weight.shape[-2:])
    return weight.float() * scales.float()[..., row[:, None], column]
