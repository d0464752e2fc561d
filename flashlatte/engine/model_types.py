"""The MLA families that the engine supports, and why it does not support the others."""

from __future__ import annotations

# Models whose decoder layers are norm, MLA, norm, MLP, with residual streams around each pair.
MODEL_TYPES = (
    "axk1",
    "axk2",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "dots3_note_text",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "hy_v4",
    "kimi_k2",
    "mistral4",
    "sarvam_mla",
    "youtu",
)

_LINEAR = "most of its layers are linear attention, and the engine has no pool of their states"
REFUSED = {
    "bailing_hybrid": _LINEAR,
    "deepseek_v41": "transformers has no such model, and Engram, which adds embeddings of n-grams, has no module here",
    "dots3_note": "it has vision and audio, and the engine takes tokens",
    "glm5_next": _LINEAR,
    "hy_v4_vl": "it is a vision model, and the engine takes tokens",
    "kimi_linear": _LINEAR,
    "longcat_flash": "its decoder layers have two attentions and a shortcut around the experts",
    "minicpm3": "its decoder scales embeddings, residuals and logits",
    "mistral_large4": "its layers share latents, and the frequencies of its rotation are learned",
}


def refusal(model_type: str) -> str | None:
    """Why the engine does not support a family that ``enable`` supports; None if it does, or for unknown families."""
    return None if model_type in MODEL_TYPES else REFUSED.get(model_type.removesuffix("_text"))
