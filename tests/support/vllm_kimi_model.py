"""vLLM's Kimi-Linear without its linear attention, with PyTorch functions in place of its compiled kernels.

Its layers for latent attention, which Kimi-K3 shares, own their cache writes and their context in prefill.
``model_class_overrides`` names ``KimiLinearForCausalLM`` of this module. ``write`` makes a checkpoint for it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from support.tiny_checkpoints import COMMON

LAYERS = COMMON["num_hidden_layers"]
# For vLLM's configuration of this model, whose names differ from transformers'.
BESIDE = {
    "mla_use_nope": True,
    "num_experts": None,
    "linear_attn_config": {
        "kda_layers": [],
        "full_attn_layers": list(range(1, LAYERS + 1)),
        "num_heads": 4,
        "head_dim": 32,
        "short_conv_kernel_size": 4,
    },
}


def write(path: Path, **changes: Any) -> Path:
    """Write a random model in float32, without experts."""
    expected = {
        name: value for name, value in COMMON.items() if name not in ("n_routed_experts", "first_k_dense_replace")
    }
    layers = {"layer_types": ["full_attention"] * LAYERS, "mlp_layer_types": ["dense"] * LAYERS}
    config = transformers.KimiLinearConfig(**expected | layers | {"rms_norm_eps": 1e-6, "pad_token_id": 258} | changes)
    torch.manual_seed(0)
    model = transformers.KimiLinearForCausalLM(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("layernorm.weight"):
                parameter.add_(0.1 * torch.randn_like(parameter))
    # transformers would save the MLPs' weights under the experts' names.
    model.config.architectures = ["KimiLinearForCausalLM"]
    model.config.save_pretrained(path)
    save_file(model.state_dict(), path / "model.safetensors", {"format": "pt"})
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | BESIDE))
    return path


def store(kv_c: torch.Tensor, k_pe: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    kept = slots >= 0
    rows = torch.cat((kv_c, k_pe.flatten(1)), -1)[kept].to(cache.dtype)
    cache[slots[kept] // cache.shape[1], slots[kept] % cache.shape[1]] = rows


def concat(k_nope: torch.Tensor, k_pe: torch.Tensor) -> torch.Tensor:
    return torch.cat((k_nope, k_pe.flatten(1)[:, None].expand(-1, k_nope.shape[1], -1)), -1)


def concat_and_store(q, k_nope, k_pe, kv_c, cache, slots, positions, cos_sin_cache):
    assert positions is None
    store(kv_c, k_pe, cache, slots)
    return concat(k_nope, k_pe)


def decode_concat_and_store(ql_nope, q_pe, kv_c, k_pe, cache, slots, *, positions, cos_sin_cache):
    assert positions is None
    store(kv_c, k_pe, cache, slots)
    return torch.cat((ql_nope, q_pe), -1)


def fused_norms(q_c, kv_c, q_weight, kv_weight, eps):
    norm = torch.nn.functional.rms_norm
    return norm(q_c, q_c.shape[-1:], q_weight, eps), norm(kv_c, kv_c.shape[-1:], kv_weight, eps)


def __getattr__(name: str) -> Any:
    if name != "KimiLinearForCausalLM":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.models.kimi_k3.nvidia import mla, model

    from flashlatte.integrations.vllm import ops

    mla.fused_mla_key_concat_kv_cache_insert = concat_and_store
    mla.fused_mla_decode_q_concat_kv_cache_insert = decode_concat_and_store
    mla.fused_mla_kv_concat = concat
    mla.fused_q_kv_rmsnorm = fused_norms
    mla.ops = ops
    mla.merge_attn_states = ops.merge_attn_states
    model.maybe_init_gemm_rs_ar = lambda *_, **__: False

    class Attention(mla.MultiHeadLatentAttention):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            # vLLM's CPU build repacks weights for its own products otherwise; the layer reads this one itself.
            self.kv_b_proj._cpu_skip_gemm_dispatch = True

    model.MultiHeadLatentAttention = Attention
    model.torch.cuda.Stream = lambda: None
    return model.KimiLinearForCausalLM
