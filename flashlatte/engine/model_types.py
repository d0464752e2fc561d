"""The MLA families that the engine supports, and why it does not support the others."""

from __future__ import annotations

# Models whose decoder layers are norm, attention, norm, MLP, with residual streams around each pair, or two such pairs
# (LongCat-Flash). Attention is MLA, and in some layers of a hybrid model linear attention.
MODEL_TYPES = (
    "axk1",
    "axk2",
    "bailing_hybrid",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "dots3_note_text",
    "glm4_moe_lite",
    "glm5_next_text",
    "glm_moe_dsa",
    "hy_v4",
    "hy_v4_vl_text",
    "kimi_k2",
    "kimi_linear",
    "longcat_flash",
    "minicpm3",
    "mistral4",
    "mistral_large4_text",
    "sarvam_mla",
    "youtu",
)

REFUSED = {
    "deepseek_v41": "transformers has no such model, and Engram, which adds embeddings of n-grams, has no module here"
}


def refusal(model_type: str) -> str | None:
    """Why the engine does not support a family that ``enable`` supports; None if it does, or for unknown families."""
    return None if model_type in MODEL_TYPES else REFUSED.get(model_type.removesuffix("_text"))
