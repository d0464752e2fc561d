"""The language model of a multimodal transformers model, for prompts of tokens only."""

from __future__ import annotations

from typing import Any

from torch import nn

from flashlatte.layers.weights import has_hooks

# Multimodal models whose language model the engine supports.
MULTIMODAL = ("dots3_note", "glm5_next", "hy_v4_vl", "mistral_large4")


class TextPart(nn.Module):
    """The decoder and the head of a multimodal model, named as in transformers' ``…ForCausalLM``.

    Args:
        whole: a transformers ``…ForConditionalGeneration``.

    Raises:
        TypeError: hooks on the model, or on its body, which are not called.
    """

    def __init__(self, whole: Any) -> None:
        super().__init__()
        # Those of ``flashlatte.integrations.transformers.enable`` prepare a call that the engine does not make.
        own = {hook.id for hook in getattr(whole.model.language_model, "_flashlatte_hooks", ())}
        if has_hooks(whole, own) or has_hooks(whole.model, own):
            raise TypeError("the model must have no hooks, as the engine does not call it: got some")
        self.model, self.lm_head = whole.model.language_model, whole.lm_head
        self.config, self.generation_config = text_config(whole.config), whole.generation_config


def text_config(config: Any) -> Any:
    """The config of the language model in a config of ``MULTIMODAL``; other configs unchanged."""
    return config.text_config if config.model_type in MULTIMODAL else config


def text_part(model: Any) -> Any:
    """The language model of a model of ``MULTIMODAL`` with a head; other models unchanged."""
    return TextPart(model) if model.config.model_type in MULTIMODAL and hasattr(model, "lm_head") else model
