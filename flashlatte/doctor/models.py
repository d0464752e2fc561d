"""A model's ``config.json``: its kinds of layers, and their sizes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashlatte.layers import MLAConfig, V4Config, V41Config
from flashlatte.layers.models import supported, text_config
from flashlatte.layers.v4.config import MODEL_TYPE as V4_MODEL_TYPE
from flashlatte.layers.v4.workspace import DEFAULT_LIMITS
from flashlatte.layers.v41.config import MODEL_TYPE as V41_MODEL_TYPE


@dataclass(frozen=True)
class LayerKind:
    """Layers of a model with the same attention.

    Attributes:
        label: which layers of the model these are, "2 of 3 layers"; None if all layers are.
    """

    config: MLAConfig
    label: str | None = None


@dataclass(frozen=True)
class ModelLayers:
    """The layers of a model.

    Attributes:
        kinds: the kinds of layers of an MLA model; empty for DeepSeek-V4 and V4.1.
        v4_layers: the layers of DeepSeek-V4.
        v41_layers: the layers of DeepSeek-V4.1.
    """

    model_type: str | None
    kinds: tuple[LayerKind, ...] = ()
    v4_layers: tuple[V4Config, ...] = ()
    v41_layers: tuple[V41Config, ...] = ()

    @property
    def is_v4(self) -> bool:
        return bool(self.v41_layers or self.v4_layers)

    @property
    def description(self) -> str:
        if self.is_v4:
            return _describe_v4(self.v41_layers or self.v4_layers)
        if len(self.kinds) == 1:
            return f"model: {_describe_mla(self.kinds[0].config)}"
        lines = (f"{kind.label}: {_describe_mla(kind.config)}" for kind in self.kinds)
        return "\n".join(("model: layers that differ", *lines))


def read_fields(path: str | Path) -> dict[str, Any]:
    """The content of a model's ``config.json``, given by its path or directory.

    Raises:
        OSError, ValueError: the file cannot be read, or is not a JSON object; the message names the file.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise OSError(
            f"model must be a config.json or its folder, and {file} cannot be read: {error.strerror}"
        ) from None
    # Also integers of more digits than Python converts, and deeper nesting than it reads.
    except (ValueError, RecursionError) as error:
        raise ValueError(f"model must be a config.json, and {file} is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"model must be a config.json, and {file} holds no object")
    return fields


def read_model(fields: Mapping[str, Any]) -> ModelLayers:
    """The attention of a model, from the content of its ``config.json``.

    Raises:
        TypeError, ValueError: as ``MLAConfig.from_transformers``, ``V4Config.layers`` and ``V41Config.layers``.
    """
    model_type = text_config(fields).get("model_type")
    if fields.get("model_type") == V41_MODEL_TYPE:
        return ModelLayers(V41_MODEL_TYPE, v41_layers=tuple(V41Config.layers(fields)))
    if fields.get("model_type") == V4_MODEL_TYPE:
        return ModelLayers(model_type, v4_layers=V4Config.layers(fields))
    return ModelLayers(model_type, layer_kinds(fields))


def layer_kinds(fields: Mapping[str, Any]) -> tuple[LayerKind, ...]:
    """The kinds of layers of an MLA model, in the order of the layers. One, unless the family's layers differ.

    Raises:
        TypeError, ValueError: as ``MLAConfig.from_transformers``.
    """
    model_type = text_config(fields).get("model_type")
    family = supported(model_type) if isinstance(model_type, str) else None
    if family is None or not family.has_layers:
        return (LayerKind(MLAConfig.from_transformers(fields)),)
    layers = MLAConfig.layers(fields)
    counts = Counter(layers)
    if len(counts) == 1:
        return (LayerKind(layers[0]),)
    return tuple(LayerKind(config, f"{count} of {len(layers)} layers") for config, count in counts.items())


def _describe_mla(config: MLAConfig) -> str:
    query = "no query latent" if config.q_lora_rank is None else f"query latent {config.q_lora_rank}"
    text = (
        f"{config.num_attention_heads} heads of {config.qk_nope_head_dim} + {config.qk_rope_head_dim} and "
        f"{config.v_head_dim}, rows of {config.kv_lora_rank} + {config.qk_rope_head_dim}, {query}, softmax scale "
        f"{config.softmax_scale:.5f}"
    )
    if config.window is not None:
        text += f", a window of {config.window} tokens"
    if config.indexer is not None:
        indexer = config.indexer
        text += f"\nindexer: {indexer.num_heads} heads of {indexer.head_dim} select {indexer.topk} tokens"
        if indexer.shared_layers:
            text += f", in all but {len(indexer.shared_layers)} layers, which reuse the selection of the layer before"
        text += ". Steps use sparse_decode and sparse_prefill; prefills of fewer tokens use dense_prefill."
    if config.attn_sink:
        text += (
            "\nattention sinks: sparse_decode and sparse_prefill take them in every backend; the layer applies them "
            "to the results of dense_decode and dense_prefill."
        )
    return text


def _describe_v4(layers: Sequence[V4Config]) -> str:
    first, lines = layers[0], []
    for (ratio, indexer), count in Counter((layer.ratio, layer.indexer) for layer in layers).items():
        visible = "only"
        if indexer is not None:
            visible = (
                f"and {indexer.topk} groups of {ratio}, selected by {indexer.num_heads} heads of {indexer.head_dim}"
            )
        elif ratio:
            visible = f"and all groups of {ratio}"
        lines.append(f"    {count} of {len(layers)} layers: a window of {first.window} tokens {visible}")
    return "\n".join(
        (
            f"model: {first.num_attention_heads} heads, rows of {first.head_dim - first.rope_dim} + {first.rope_dim}",
            *lines,
            f"Requests with at least {DEFAULT_LIMITS.min_queries} new tokens use sparse_prefill over a workspace, "
            "others sparse_decode.",
        )
    )
