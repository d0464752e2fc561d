"""The cache formats that a model supports, from its config, before any weight is read."""

from __future__ import annotations

from typing import Any

import torch

from flashlatte.engine.layer_configs import layer_configs
from flashlatte.kv_cache import FORMAT_NAMES, CacheFormat, get_format
from flashlatte.layers import MLAConfig, V4Config
from flashlatte.layers.v4.config import MODEL_TYPE as V4_MODEL_TYPE
from flashlatte.runtime import checks


def check_cache_format(config: Any, cache_format: Any, dtype: torch.dtype | None) -> None:
    """Raise ValueError unless a model of this transformers config (and dtype, if known) supports the format."""
    if config.model_type == V4_MODEL_TYPE:
        window_format(V4Config.layers(config)[0], cache_format, dtype)
    else:
        for layer in dict.fromkeys(layer_configs(config)):
            latent_format(layer, cache_format)


def latent_format(config: MLAConfig, cache_format: Any) -> CacheFormat:
    """The format of an MLA model's rows.

    Raises:
        ValueError: the model does not support the format; lists those that it supports.
    """
    latent, rope = config.kv_lora_rank, config.qk_rope_head_dim
    indexed, windowed = config.indexer is not None, config.window is not None

    def fits(layout: CacheFormat) -> bool:
        if layout.plain:
            return not ((indexed or windowed) and layout.takes_scale)
        return (layout.latent_dim, layout.rope_dim) == (latent, rope)

    rows = f"rows of {latent} + {rope}" + (" and an indexer" if indexed else " in a window" if windowed else "")
    return _checked_format(cache_format, [name for name in FORMAT_NAMES if fits(get_format(name))], latent + rope, rows)


def window_format(config: V4Config, cache_format: Any, dtype: torch.dtype | None) -> CacheFormat:
    """The format of a DeepSeek-V4's rows.

    Args:
        dtype: dtype of the model and of unquantized rows; None: not known yet.

    Raises:
        ValueError: the model does not support the format; lists those that it supports.
    """

    def fits(layout: CacheFormat) -> bool:
        if layout.plain:
            return not layout.takes_scale and dtype in (None, layout.record_dtype)
        return (layout.latent_dim, layout.rope_dim) == (config.head_dim - config.rope_dim, config.rope_dim)

    rows = f"rows of {config.head_dim}" + ("" if dtype is None else f" of a model in {checks.dtype_names([dtype])}")
    return _checked_format(
        cache_format, [name for name in FORMAT_NAMES if fits(get_format(name))], config.head_dim, rows
    )


def _checked_format(cache_format: Any, accepted: list[str], head_dim: int, rows: str) -> CacheFormat:
    name = cache_format.name if isinstance(cache_format, CacheFormat) else cache_format
    if name not in accepted:
        raise ValueError(f"cache_format must be {checks.join_or(accepted)} for {rows}, got {name!r}")
    return get_format(name, head_dim)
