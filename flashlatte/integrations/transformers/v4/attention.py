"""``DeepseekV4Attention`` over a ``V4Store``, and the hooks around a pass. Importing this imports transformers."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from transformers.cache_utils import DynamicCache
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4Attention,
    DeepseekV4HyperConnection,
    DeepseekV4Model,
)

from flashlatte.integrations.transformers import hooks
from flashlatte.integrations.transformers.calls import CACHE, arguments, check_tokens, tokens_of
from flashlatte.integrations.transformers.indexer_losses import LossHooks
from flashlatte.integrations.transformers.paged_cache import PagedCache, PagedLayer
from flashlatte.integrations.transformers.patching import change_class, check_forward
from flashlatte.integrations.transformers.training import STEP
from flashlatte.integrations.transformers.v4 import training
from flashlatte.integrations.transformers.v4.store import V4Store
from flashlatte.kv_cache.registry import as_format, plain_format
from flashlatte.layers.fused_projections import fuse_weights_on_gpu
from flashlatte.layers.v4 import V4Config
from flashlatte.layers.v4.attention import attend
from flashlatte.layers.v4.hyper_connection import read_streams
from flashlatte.layers.v4.modules import check_weights, hidden_projections
from flashlatte.runtime import gradients

Model, Attention = DeepseekV4Model, DeepseekV4Attention

# Keeps the model from creating a mask, which would not be used.
_NO_MASK = {"flashlatte": None}
_NOT_CONVERTIBLE = "the cache was filled by FlashLatte, and stock DeepSeek-V4 cannot read its pages"


class PagedV4Layer(PagedLayer):
    is_sliding = True
    is_croppable = False


class PagedV4Cache(PagedCache):
    """A ``DynamicCache`` whose layers are stored in a ``V4Store``. ``adopt`` converts a caller's empty cache in place.

    Attributes:
        filled_for: the config of the model that fills the cache.
    """

    store: V4Store
    layer_class = PagedV4Layer
    filled_for: Any

    @classmethod
    def adopt(cls, cache: DynamicCache, store: V4Store, config: Any) -> PagedV4Cache:
        paged = cls._from_empty(cache, store, len(store.configs))
        paged.filled_for = config
        return paged

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError(_NOT_CONVERTIBLE)

    def crop(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError("a DeepSeek-V4 cache cannot be cropped: it does not store the tokens of its groups")


class PagedV4Attention(DeepseekV4Attention):
    """Attention over a ``PagedV4Cache``, or of a training step; else it runs the original forward.

    The class adds no state: it is set on existing attention modules by changing their class.
    """

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if (training_step := kwargs.pop(STEP, None)) is not None:
            return training.attend(self, hidden_states, training_step, kwargs["position_embeddings"]), None
        cache = kwargs.get(CACHE)
        if args or not isinstance(cache, PagedV4Cache):
            return super().forward(hidden_states, *args, **kwargs)
        store, layer = cache.store, self.layer_idx
        step = store.step(kwargs["position_ids"])
        module: Any = self
        gradients.warn_if_dropped("DeepseekV4Attention of an enabled model", hidden_states)
        with torch.no_grad():
            rows = hidden_states.flatten(0, 1)
            out = attend(module, store.configs[layer], rows, step, store.cache(layer), store.backend)
        return out.view(hidden_states.shape), None


class FusedHyperConnection(DeepseekV4HyperConnection):
    """A hyper-connection in two launches; it runs the original forward with gradients and under autocast.

    The class adds no state.
    """

    def forward(self, hidden_streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        records = torch.is_grad_enabled() and (hidden_streams.requires_grad or self.fn.requires_grad)
        if self.training or records or torch.is_autocast_enabled(hidden_streams.device.type):
            return super().forward(hidden_streams)
        mixed = read_streams(self, hidden_streams.flatten(0, 1).contiguous(), None)
        post, comb, hidden = (value.unflatten(0, hidden_streams.shape[:2]) for value in mixed)
        return post, comb, hidden


class BeginV4Forward:
    """Pre-hook of the decoder: plans a training step, or a step of a paged cache, which it creates or checks."""

    def __init__(self, settings: hooks.Settings) -> None:
        self.settings = settings

    def __call__(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        call = arguments(model, args, kwargs)
        tokens = tokens_of(call)
        if (step := training.plan(model, call, self.settings.dense_warmup)) is not None:
            return (), call | {STEP: step, "use_cache": False, "attention_mask": _NO_MASK}
        cache = None if tokens is None else self._cache_for(model, call)
        if tokens is None or cache is None:
            return None
        check_tokens(tokens)
        mask = call.get("attention_mask")
        if mask is not None and not (isinstance(mask, torch.Tensor) and mask.dim() == 2):
            raise ValueError("attention_mask must be [b, columns] or None with a FlashLatte cache")
        cache.store.plan(tokens.shape[0], tokens.shape[1], tokens.device, mask, call.get("position_ids"))
        return (), call | {CACHE: cache, "attention_mask": _NO_MASK}

    def _cache_for(self, model: Any, call: dict[str, Any]) -> PagedV4Cache | None:
        """The paged cache of this pass; None if stock attention computes it."""
        cache = call.get(CACHE)
        bidirectional = getattr(model.config, "is_causal", True) is False
        if bidirectional or hooks.needs_stock_attention(model, call):
            if isinstance(cache, PagedV4Cache):
                raise ValueError(_NOT_CONVERTIBLE)
            return None
        if isinstance(cache, PagedV4Cache):
            self._check_model(cache, model)
            return cache
        cache = hooks.cache_to_adopt(model, call)
        return None if cache is None else PagedV4Cache.adopt(cache, new_store(model, self.settings), model.config)

    @staticmethod
    def _check_model(cache: PagedV4Cache, model: Any) -> None:
        """Raise ValueError for a cache that a model with other layers filled."""
        # The identity check is faster than reading a config.
        if cache.filled_for is model.config:
            return
        if cache.store.model_configs != V4Config.layers(model.config):
            raise ValueError("the cache was filled by a model with layers of other sizes or types")
        cache.filled_for = model.config


def new_store(model: Any, settings: hooks.Settings) -> V4Store:
    """An empty store in the configured format, or in that of the model's dtype.

    Raises:
        TypeError, ValueError: a format that does not fit the model's rows, or a setting that DeepSeek-V4 lacks.
    """
    config = model.config
    for name in ("k_scale", "index_format"):
        if getattr(settings, name) is not None:
            raise ValueError(f"{name} must be None for DeepSeek-V4, got {getattr(settings, name)!r}")
    if settings.cache_format is None:
        layout = plain_format(model.dtype, config.head_dim)
    else:
        layout = as_format(settings.cache_format, config.head_dim)
    if layout.takes_scale or not (layout.plain or (layout.tiling is not None and layout.tiling.e8m0)):
        raise ValueError(f"cache_format must be model1, bf16, fp16 or fp32 for DeepSeek-V4, got {layout.name!r}")
    if layout.plain and layout.record_dtype != model.dtype:
        raise ValueError(f"cache_format must be model1 or that of the model's {model.dtype}, got {layout.name!r}")
    return V4Store(list(V4Config.layers(config)), layout, settings.page_size, settings.backend)


def enable(decoder: Any, settings: hooks.Settings, loss: LossHooks) -> list[Any]:
    """Change the classes of a decoder's attention modules and hyper-connections; returns the registered hooks."""
    new_store(decoder, settings)
    modules, configs = [layer.self_attn for layer in decoder.layers], V4Config.layers(decoder.config)
    for index, module in enumerate(modules):
        if type(module) not in (DeepseekV4Attention, PagedV4Attention):
            raise TypeError(f"layer {index}'s attention must be a DeepseekV4Attention, got {type(module).__name__}")
        check_forward(module, index)
        check_weights(module, configs[index], decoder.dtype)
    fuse_weights_on_gpu(map(hidden_projections, modules, configs))
    for layer in decoder.layers:
        change_class(layer.self_attn, PagedV4Attention)
        _change_connections(layer, DeepseekV4HyperConnection, FusedHyperConnection)
    return hooks.register(decoder, BeginV4Forward(settings), loss)


def disable(decoder: Any) -> None:
    for layer in decoder.layers:
        if type(layer.self_attn) is PagedV4Attention:
            change_class(layer.self_attn, DeepseekV4Attention)
        _change_connections(layer, FusedHyperConnection, DeepseekV4HyperConnection)


def _change_connections(layer: Any, before: type, after: type) -> None:
    """Change the class of a layer's hyper-connections, except those of other classes."""
    for module in (layer.attn_hc, layer.ffn_hc):
        if type(module) is before:
            change_class(module, after)
