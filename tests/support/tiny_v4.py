"""A small random DeepSeek-V4 on disk, under DeepSeek's own names, as vLLM loads it; transformers reads it too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

# Experts by token in every layer: a choice by score has near ties. vLLM's CPU build knows DeepSeek's numbers of them.
EXPERTS, CHOSEN, VOCABULARY = 256, 6, 320
RATIOS = (0, 4, 128, 4)
CONFIG = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": len(RATIOS),
    "compress_ratios": list(RATIOS),
    "num_hash_layers": len(RATIOS),
    "num_attention_heads": 4,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 96,
    "o_groups": 2,
    "o_lora_rank": 64,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 512,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
    "n_shared_experts": 1,
    "sliding_window": 128,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 2048,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "initializer_range": 0.08,
}
# Fields that transformers derives from the configuration, and vLLM before 0.33 rejects.
DERIVED = ("layer_types", "mlp_layer_types", "compress_rates", "rope_parameters", "partial_rotary_factor")
# Fields that vLLM reads, and transformers omits or names differently.
BESIDE = {name: CONFIG[name] for name in ("compress_ratios", "num_hash_layers", "qk_rope_head_dim")} | {
    "topk_method": "noaux_tc",
    "expert_dtype": "bf16",
}


def write(path: Path, **changes: Any) -> Path:
    """Write the model, in bfloat16, with these changes of its configuration."""
    torch.manual_seed(0)
    model = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**CONFIG | changes))
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("norm.weight"):
                tensor.add_(0.1 * torch.randn_like(tensor))
            elif name.endswith(("sinks", "position_bias")):
                tensor.add_(0.5 * torch.randn_like(tensor))
            elif name.endswith("tid2eid"):
                tensor.copy_(torch.rand(VOCABULARY, EXPERTS).argsort()[:, :CHOSEN])
    model.bfloat16().save_pretrained(path)
    tensors, config = path / "model.safetensors", path / "config.json"
    save_file({_published(name): tensor for name, tensor in load_file(tensors).items()}, tensors, {"format": "pt"})
    written = {name: value for name, value in json.loads(config.read_text()).items() if name not in DERIVED}
    config.write_text(json.dumps(written | BESIDE))
    return path


def _published(name: str) -> str:
    """DeepSeek's name of a tensor that transformers has saved."""
    name = name.removeprefix("model.").replace("embed_tokens", "embed").replace("hc_head.hc_", "hc_head_")
    return name.replace("attn.norm.", "attn.kv_norm.")
