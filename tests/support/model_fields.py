"""Fields of a small DeepSeek-V3's ``config.json``, for tests that compile its kernels."""

from typing import Any

V3_FIELDS: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 256,
    "num_attention_heads": 16,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "q_lora_rank": 128,
    "max_position_embeddings": 4096,
}
