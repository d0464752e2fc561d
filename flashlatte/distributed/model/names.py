"""Names that checkpoints have for the weights of transformers' models."""

from __future__ import annotations

import re

from flashlatte.layers.v4.config import MODEL_TYPE as V4

# DeepSeek-V4's own, as DeepSeek publishes it and transformers saves it: patterns of parts, in this order.
_OF_V4 = [
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
# A norm of A.X K1, which has this name only in transformers.
_OF_OTHERS = [(r"(?<!\.mlp)\.post_mlp_layernorm\.", ".mlp.post_mlp_layernorm.")]


def in_transformers(name: str, model_type: str) -> str:
    """What transformers calls a tensor of a checkpoint, where each expert still has its own weights."""
    for pattern, replacement in _OF_V4 if model_type == V4 else _OF_OTHERS:
        name = re.sub(pattern, replacement, name)
    return name
