"""The configs of a model's layers, also of models that ``MLAConfig.from_transformers`` refuses."""

from __future__ import annotations

from typing import Any

from flashlatte.layers import MLAConfig, models
from flashlatte.layers.config import SIZES, indexer_config, max_position_embeddings
from flashlatte.layers.config_fields import check_fields
from flashlatte.layers.rope_config import Rope
from flashlatte.runtime import checks

_POOL_FIELDS = ("index_kpool", "index_kpool_always_select_tail")
# Fields of Mistral Large 4 that the modules of its layers have read.
_SHARING_FIELDS = ("kv_source_layers", "no_rope_layers", "no_rope_layer_interval", "final_logit_softcapping")


def selects_pools(config: Any) -> bool:
    """Whether the indexer of a transformers config selects pools of tokens (GLM-5.3-Flash)."""
    return getattr(config, _POOL_FIELDS[0], None) is not None


def shares_latents(config: Any) -> bool:
    """Whether layers of a transformers config read the latents of earlier layers (Mistral Large 4)."""
    return hasattr(config, _SHARING_FIELDS[0])


def layer_configs(config: Any) -> tuple[MLAConfig, ...]:
    """``MLAConfig.layers``, also for a model whose indexer selects pools, or whose layers share latents.

    If the indexer selects pools, the MLA layers take the selection as indices. Layers that share latents run as
    transformers' modules (``ModuleAttention``); their configs describe only rows and selection.

    Raises:
        TypeError, ValueError: as ``MLAConfig.layers``.
    """
    traits = models.supported(config.model_type)
    if traits is None or traits.has_layers:
        return MLAConfig.layers(config)
    layers = range(checks.positive_int("num_hidden_layers", config.num_hidden_layers))
    if selects_pools(config):
        return (_layer(config, traits, _POOL_FIELDS, models.UNROTATED),) * len(layers)
    if shares_latents(config):
        return tuple(_sharing_layer(config, traits, bool(config.no_rope_layers[layer])) for layer in layers)
    return (MLAConfig.from_transformers(config),) * len(layers)


def _sharing_layer(config: Any, traits: models.Traits, rotates: bool) -> MLAConfig:
    """A layer of Mistral Large 4. Without rotation, a key has no RoPE dims besides the latent."""
    # Frequencies that depend on a request's length would not match the keys that are already in the cache.
    models.standardized_rope(models.rope_parameters(config.to_dict()), traits.rope_theta, traits.max_position)
    if rotates:
        return _layer(config, traits, _SHARING_FIELDS, models.INTERLEAVED)
    sizes = {"qk_nope_head_dim": config.qk_nope_head_dim + config.qk_rope_head_dim, "qk_rope_head_dim": 0}
    return _layer(config, traits, _SHARING_FIELDS, models.UNROTATED, sizes)


def _layer(
    config: Any,
    traits: models.Traits,
    accepted: tuple[str, ...],
    rope_layout: str,
    changes: dict[str, int] | None = None,
) -> MLAConfig:
    """The config of a layer, with ``accepted`` fields that ``MLAConfig`` does not have."""
    fields = {name: value for name, value in models.config_fields(config).items() if name not in accepted}
    check_fields(fields, traits)
    sizes: dict[str, Any] = {name: fields[name] for name in SIZES} | (changes or {})
    return MLAConfig(
        **sizes,
        q_lora_rank=fields.get("q_lora_rank"),
        rope=Rope(layout=rope_layout, max_position=max_position_embeddings(fields, traits.max_position)),
        norm_eps=fields["rms_norm_eps"],
        attention_bias=fields["attention_bias"],
        indexer=indexer_config(fields, traits),
    )
