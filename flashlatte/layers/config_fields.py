"""Fields of a model's config that change its attention, and refusal of those that would be ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashlatte.layers import models


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# A field with one of these words in its name is about attention.
_WORDS = _words(
    """attn attention alibi dsa gate gated index indexer kv latent lora mla nope qk rope rotary sink sinks sliding
    softcap softcapping sparse swa window"""
)
# Words of fields about other parts of a model.
_OTHER_PARTS = _words("audio cross expert experts kda linear mlp moe router vision")
_KNOWN = _words(
    """attention_bias attention_dropout attention_method attn_implementation gated_norm_rank index_head_dim
    index_n_heads index_topk index_topk_freq index_topk_pattern index_skip_topk_offset indexer_rope_interleave
    indexer_types kv_cache_dtype kv_cache_scheme kv_lora_rank learnable_sink_init mla_scale_kv_lora mla_scale_q_lora
    mla_use_nope num_attention_heads num_key_value_heads output_attentions q_lora_rank qk_head_dim qk_nope_head_dim
    qk_rope_head_dim rope_interleave rope_parameters rope_scaling rope_theta"""
)
_ROPE = _words(
    """attention_factor beta_fast beta_slow factor llama_4_scaling_beta max_position_embeddings mrope_interleaved
    mrope_section mscale mscale_all_dim original_max_position_embeddings partial_rotary_factor rope_theta rope_type
    truncate type"""
)
_LAYER_TYPES = ("full_attention", "indexed_attention", "linear_attention")


def of_layer(fields: Mapping[str, Any], layer: int | None) -> dict[str, Any]:
    """The fields of one layer of a family whose layers differ, with ``layer_types`` and ``sliding_window`` of its own.

    Raises:
        TypeError, ValueError: no layer, or one that the model does not have; ``layer_types`` that are unknown, or with
            full and indexed attention; a ``per_layer_config`` without objects.
    """
    types = models.list_of(fields, "layer_types")
    if layer is None:
        raise ValueError(f"layer must be given for a {fields.get('model_type')}, whose layers differ, got None")
    if not 0 <= layer < len(types):
        raise ValueError(f"layer must be from 0 to {len(types) - 1}, got {layer}")
    _check_layer_types(types, has_windows=True)
    if {"full_attention", "indexed_attention"} <= set(types):
        raise ValueError("layer_types must not have both indexed_attention and full_attention, got both")
    kind, changed = types[layer], models.sub_config(fields, "per_layer_config")
    # A transformers config has ints as keys, and its config.json strings.
    differences = {str(key): value for key, value in changed.items()}.get(str(layer)) or {}
    if not isinstance(differences, Mapping):
        raise ValueError(f"per_layer_config[{layer}] must be an object, got {differences!r}")
    own = {**fields, **differences}
    own.pop("per_layer_config", None)
    rope = models.rope_parameters(fields)
    window = fields.get("sliding_window") if kind == "sliding_attention" else None
    if kind == "sliding_attention" and window is None:
        raise ValueError("config must have sliding_window for layers of sliding_attention, got None")
    return own | {"rope_parameters": rope.get(kind, rope), "layer_types": [kind], "sliding_window": window}


def check_fields(fields: Mapping[str, Any], traits: models.Traits) -> None:
    """Raise ValueError for fields about attention that are unknown, or contradict the family.

    An unknown field that is null, false, 0 or empty is accepted: it switches something off.
    """
    known = {"sliding_window"} if traits.has_layers else set()
    unknown = [name for name, value in fields.items() if _is_unknown(name) and name not in known and _is_set(value)]
    rope = models.rope_parameters(fields)
    unknown += [f"rope_parameters.{name}" for name, value in rope.items() if name not in _ROPE and _is_set(value)]
    if unknown:
        raise ValueError(
            f"config must have no fields about attention that are unknown here, got {', '.join(sorted(unknown))}: "
            "remove them if they do not change the attention"
        )
    expected = {
        "attention_method": "MLA",
        "indexer_rope_interleave": traits.index_rope_layout == models.INTERLEAVED,
        "mla_scale_kv_lora": traits.scales_latents,
        "mla_scale_q_lora": traits.scales_latents,
        "mla_use_nope": traits.rope_layout == models.UNROTATED,
    }
    for name, value in expected.items():
        if fields.get(name) not in (None, value):
            raise ValueError(f"{name} of a {fields.get('model_type')} must be {value!r}, got {fields[name]!r}")
    if rope.get("llama_4_scaling_beta") and not traits.scales_queries:
        raise ValueError(
            f"rope_parameters of a {fields.get('model_type')} must have no llama_4_scaling_beta, "
            f"got {rope['llama_4_scaling_beta']}"
        )
    if traits.has_layers and rope.get("truncate") is False:
        # transformers looks for it beside the layer types' parameters, where it is not.
        raise ValueError(f"truncate must be true in the yarn of a {fields.get('model_type')}, got false")
    _check_layer_types(models.list_of(fields, "layer_types"), has_windows=traits.has_layers)


def _check_layer_types(kinds: list[Any], *, has_windows: bool) -> None:
    types = (*_LAYER_TYPES, "sliding_attention") if has_windows else _LAYER_TYPES
    for kind in kinds:
        if kind not in types:
            raise ValueError(f"layer_types must be {', '.join(types)}, got {kind!r}")


def _is_unknown(name: str) -> bool:
    words = set(name.lower().split("_"))
    return bool(words & _WORDS) and not words & _OTHER_PARTS and name not in _KNOWN and not name.startswith("_")


def _is_set(value: Any) -> bool:
    """Whether a field switches something on."""
    return bool(value) if isinstance(value, (bool, int, float, str, list, tuple, dict)) else value is not None
