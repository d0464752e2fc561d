"""Hooks around a forward pass of an enabled model. Importing this module imports transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from flashlatte.integrations.transformers import indexer as stock_indexer
from flashlatte.integrations.transformers import training
from flashlatte.integrations.transformers.cache import PagedLatentCache
from flashlatte.integrations.transformers.calls import CACHE, arguments, check_tokens, tokens_of
from flashlatte.integrations.transformers.families import Family, attentions, linear_layers
from flashlatte.integrations.transformers.indexer_losses import LossHooks
from flashlatte.integrations.transformers.padded import PagedLatents
from flashlatte.integrations.transformers.paged_cache import PagedCache
from flashlatte.kv_cache import CacheFormat
from flashlatte.kv_cache.registry import format_of_rows
from flashlatte.layers import IndexerConfig, models
from flashlatte.layers.cache import LatentCache
from flashlatte.layers.config import indexer_config
from flashlatte.runtime import dispatch

_FORMAT_OF_DTYPE = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Settings:
    """The arguments of ``enable``."""

    cache_format: str | CacheFormat | None
    page_size: int
    backend: str | None
    k_scale: float | None
    index_format: str | None
    dense_warmup: bool


class BeginForward:
    """Pre-hook of the decoder: plans a training step, or a step of a paged cache, which it creates or checks.

    It holds no reference to the model, so that it works in a copied model.
    """

    def __init__(self, family: Family, settings: Settings) -> None:
        self.family = family
        self.settings = settings

    def __call__(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        call = arguments(model, args, kwargs)
        tokens = tokens_of(call)
        if tokens is None:
            return None
        step = training.plan(
            model, self.family, call, lambda: indexer_of(model, self.family), self.settings.dense_warmup
        )
        if step is not None:
            return (), call | {training.STEP: step, "use_cache": False}
        cache = self._cache_for(model, call)
        if cache is None:
            return None
        check_tokens(tokens)
        mask = call.get("attention_mask")
        plain_mask = isinstance(mask, torch.Tensor) and mask.dim() == 2
        cache.store.plan(
            tokens.shape[0],
            tokens.shape[1],
            tokens.device,
            mask if plain_mask else None,
            opaque_mask=not (mask is None or plain_mask),
            causal=call.get("is_causal", getattr(model.config, "is_causal", True)) is not False,
        )
        return (), call | {CACHE: cache}

    def _cache_for(self, model: Any, call: dict[str, Any]) -> PagedLatentCache | None:
        """The paged cache of this pass; None if stock attention computes it."""
        cache = call.get(CACHE)
        if needs_stock_attention(model, call):
            if isinstance(cache, PagedLatentCache):
                cache.release()
            return None
        if isinstance(cache, PagedLatentCache):
            _check_model(cache, model, self.family)
            return cache
        cache = cache_to_adopt(model, call)
        if cache is None:
            return None
        latents, config = new_latents(model, self.settings, self.family), model.config
        paged = PagedLatentCache.adopt(
            cache, latents, _num_layers(model, self.family), self.family.splits_pairs(config), config
        )
        if linear := linear_layers(model, self.family):
            layers = DynamicCache(config=config).layers
            for index in linear:
                paged.layers[index] = layers[index]
        return paged


def register(decoder: Any, begin: Callable[..., Any], loss: LossHooks) -> list[Any]:
    """Register the hooks around a decoder's forward: ``begin``, the commit of its tokens, and the indexers' losses."""
    return [
        decoder.register_forward_pre_hook(begin, with_kwargs=True),
        decoder.register_forward_hook(_commit, with_kwargs=True),
        decoder.register_forward_hook(loss.end_decoder, with_kwargs=True),
    ]


def _commit(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Commit the tokens of a successful pass."""
    cache = kwargs.get(CACHE)
    if isinstance(cache, PagedCache):
        cache.store.commit()


def needs_stock_attention(model: Any, call: dict[str, Any]) -> bool:
    """Whether only stock attention can compute the pass.

    It is needed for gradients, dropout, attention weights, and autocast to another dtype than the model's.
    """
    if model.training or call.get("output_attentions", model.config.output_attentions):
        return True
    device_type = model.device.type
    if torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type) != model.dtype:
        return True
    if not torch.is_grad_enabled():
        return False
    embeds = call.get("inputs_embeds")
    return (embeds is not None and embeds.requires_grad) or any(p.requires_grad for p in model.parameters())


def new_latents(model: Any, settings: Settings, family: Family) -> PagedLatents:
    """An empty store in the configured format, or in that of the model's dtype.

    Raises:
        ValueError: the model's latent does not fit the format.
    """
    (latent_dim, rope_dim), layer_rows = _row_widths(model, family)
    wanted = settings.cache_format
    if wanted is None:
        wanted = _FORMAT_OF_DTYPE.get(model.dtype)
        if wanted is None:
            raise ValueError(f"model must be bfloat16, float16 or float32, got {model.dtype}")
    layout = format_of_rows(wanted, latent_dim, rope_dim)
    for widths in layer_rows.values():
        format_of_rows(wanted, *widths)
    if settings.k_scale is not None and not layout.takes_scale:
        raise ValueError(f"k_scale belongs to cache_format 'fp8', got {layout.name!r}")
    indexer = indexer_of(model, family)
    index_layout = stock_indexer.index_layout(settings.index_format, layout, indexer)
    return PagedLatents(
        layout, latent_dim, settings.page_size, settings.k_scale, settings.backend, indexer, index_layout, layer_rows
    )


def _row_widths(model: Any, family: Family) -> tuple[tuple[int, int], dict[int, tuple[int, int]]]:
    """kv_lora_rank and qk_rope_head_dim of the first layer, and of the layers where they differ from it."""
    found = {
        module.layer_idx: (module.kv_lora_rank, module.qk_rope_head_dim) for _, module in attentions(model, family)
    }
    common = next(iter(found.values()))
    return common, {layer: widths for layer, widths in found.items() if widths != common}


def indexer_of(model: Any, family: Family) -> IndexerConfig | None:
    """The indexer's config, None for models without one."""
    without = all(getattr(module, "indexer", None) is None for _, module in attentions(model, family))
    if without or family.selects_columns:
        return None
    return indexer_config(model.config.to_dict(), models.SUPPORTED[family.model_type])


def check_backend(model: Any, latents: PagedLatents, family: Family) -> None:
    """Raise ValueError if the configured backend does not support the model's decode steps on its current device."""
    if latents.backend is None:
        return
    cache = LatentCache(torch.empty(0, device=model.device), latents.layout, latents.latent_dim)
    _, first = attentions(model, family)[0]
    operation = "dense_decode" if latents.layout.plain and latents.indexer is None else "sparse_decode"
    call = dispatch.CallSpec(
        operation,
        model.device,
        cache.query_dtype(model.dtype, reference=latents.backend == "reference"),
        cache_format=latents.layout.name,
        page_size=latents.page_size,
        head_dim=latents.layout.head_dim,
        head_dim_v=cache.value_dim,
        h_q=first.o_proj.in_features // first.v_head_dim,
        h_kv=1,
    )
    dispatch.select(call, latents.backend)


def _check_model(cache: PagedLatentCache, model: Any, family: Family) -> None:
    """Raise ValueError for a cache that a model with other sizes, layers or another indexer filled."""
    config, latents = model.config, cache.store
    # The identity check is faster than reading a config, and torch.compile cannot trace the comparison of fields.
    if cache.filled_for is config:
        return
    cached = latents.latent_dim, latents.layout.head_dim - latents.latent_dim
    wanted, layer_rows = _row_widths(model, family)
    if cached != wanted:
        raise ValueError(
            f"the cache has rows of kv_lora_rank {cached[0]} and qk_rope_head_dim {cached[1]}, and the model's are "
            f"{wanted[0]} and {wanted[1]}: it was filled by another model"
        )
    if latents.layer_rows != layer_rows:
        raise ValueError("the cache has rows of other widths in some layers: it was filled by another model")
    if len(cache.layers) != (num_layers := _num_layers(model, family)):
        raise ValueError(
            f"the cache has {len(cache.layers)} layers, and the model {num_layers}: it was filled by another model"
        )
    if [index for index, _ in cache.linear_layers] != linear_layers(model, family):
        raise ValueError("the cache has states of other layers than the model's: it was filled by another model")
    if latents.indexer != indexer_of(model, family):
        raise ValueError("the cache holds index keys of another indexer, or none: it was filled by another model")
    cache.filled_for = config


def _num_layers(model: Any, family: Family) -> int:
    """Number of cache layers: one for each attention module of the decoder."""
    return 1 + max([module.layer_idx for _, module in attentions(model, family)] + linear_layers(model, family))


def cache_to_adopt(model: Any, call: dict[str, Any]) -> DynamicCache | None:
    """The empty ``DynamicCache`` of this pass to convert; None without a cache, or if stock attention filled it."""
    cache = call.get(CACHE)
    if cache is None:
        use_cache = call.get("use_cache")
        if not (model.config.use_cache if use_cache is None else use_cache):
            return None
        cache = DynamicCache()
    if type(cache) is not DynamicCache or cache.offloading:
        raise ValueError(
            f"{CACHE} must be None or a DynamicCache that is not offloaded, for an enabled model, "
            f"got {_describe(cache)}: leave cache_implementation unset, or disable(model) first"
        )
    # Stock attention filled it (before enable, or while recording gradients), and continues with it.
    return None if cache.get_seq_length() else cache


def _describe(cache: Any) -> str:
    return f"an offloaded {type(cache).__name__}" if getattr(cache, "offloading", False) else type(cache).__name__
