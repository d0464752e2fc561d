"""A model of DeepSeek-V3's layer sizes for vLLM: its configuration."""

from __future__ import annotations

import json
from pathlib import Path

V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "vocab_size": 4096,  # a small one, so that sampling is short and a random model's tokens are no near ties
    "torch_dtype": "bfloat16",
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "moe_intermediate_size": 2048,
    "num_nextn_predict_layers": 0,
}


def write_v3(folder: Path, layers: int) -> None:
    """Write the config.json of ``layers`` layers with dense MLPs, as DeepSeek-V3's first three."""
    config = V3 | {"num_hidden_layers": layers, "first_k_dense_replace": layers}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
