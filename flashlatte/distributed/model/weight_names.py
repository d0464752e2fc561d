"""Conversion of checkpoints' tensor names to transformers' names."""

from __future__ import annotations

import re

from flashlatte.layers.v4.config import MODEL_TYPE as V4

# DeepSeek-V4's names, as published by DeepSeek and saved by transformers: patterns that are applied in this order.
_V4_PATTERNS = [
    (r"^model\.", ""),
    (r"\.scale$", ".weight_scale_inv"),
    (r"^embed\.", "embed_tokens."),
    (r"^hc_head_", "hc_head.hc_"),
    (r"\.hc_(attn|ffn)_", r".\1_hc."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.attn_sink$", ".sinks"),
    (r"\.attn\.", ".self_attn."),
    (r"\.ffn\.", ".mlp."),
    (r"\.self_attn\.indexer\.compressor\.", ".self_attn.compressor.indexer."),
    (r"\.self_attn\.indexer\.weights_proj\.", ".self_attn.compressor.indexer.scorer.weights_proj."),
    (r"\.self_attn\.indexer\.", ".self_attn.compressor.indexer."),
    (r"\.norm\.", ".kv_norm."),
    (r"\.q_norm\.", ".q_a_norm."),
    (r"\.ape$", ".position_bias"),
    (r"\.wq_([ab])\.", r".q_\1_proj."),
    (r"\.wo_([ab])\.", r".o_\1_proj."),
    (r"\.wkv\.", ".kv_proj."),
    (r"\.wgate\.", ".gate_proj."),
    (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
    (r"\.w1\.", ".gate_proj."),
    (r"\.w2\.", ".down_proj."),
    (r"\.w3\.", ".up_proj."),
    (r"^", "model."),
    (r"^model\.(lm_)?head\.", "lm_head."),
]
# A norm of A.X K1, whose name differs in transformers.
_OTHER_PATTERNS = [(r"(?<!\.mlp)\.post_mlp_layernorm\.", ".mlp.post_mlp_layernorm.")]


def in_transformers(name: str, model_type: str) -> str:
    """transformers' name of a checkpoint's tensor, with separate weights for each expert."""
    for pattern, replacement in _V4_PATTERNS if model_type == V4 else _OTHER_PATTERNS:
        name = re.sub(pattern, replacement, name)
    return name
