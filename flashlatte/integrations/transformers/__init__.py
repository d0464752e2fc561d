"""FlashLatte in Hugging Face transformers: ``enable`` an MLA model, ``disable`` it again.

>>> from flashlatte.integrations.transformers import enable
>>> enable(model)
>>> model.generate(**inputs)
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from flashlatte.kv_cache import scales
from flashlatte.runtime import checks, dispatch

if TYPE_CHECKING:
    from flashlatte.integrations.transformers.families import Family
    from flashlatte.integrations.transformers.hooks import Settings
    from flashlatte.integrations.transformers.indexer_losses import LossHooks
    from flashlatte.kv_cache import CacheFormat

__all__ = ["disable", "enable"]

OLDEST_TRANSFORMERS = "5.17"

Model = TypeVar("Model", bound=nn.Module)


def enable(
    model: Model,
    cache_format: str | CacheFormat | None = None,
    page_size: int = 64,
    backend: str | None = None,
    k_scale: float | None = None,
    index_format: str | None = None,
    indexer_loss_coef: float = 1.0,
    dense_warmup: bool = False,
) -> Model:
    """Patch a transformers model in place to use FlashLatte's paged cache and attention.

    Supported families: AXK1, AXK2, BailingHybrid (Ling 3.0), DeepseekV2, DeepseekV3 (with Kimi-K2), DeepseekV32,
    DeepseekV4, Dots3Note, Glm4MoeLite, Glm5Next (GLM-5.3-Flash), GlmMoeDsa (GLM-5), HYV4 and HYV4VL (Hy4), KimiLinear,
    LongcatFlash, MiniCPM3, Mistral4, MistralLarge4 and Youtu, and models with one of them as their language model, such
    as Kimi-K2.5.

    A forward pass with a cache then runs FlashLatte's MLA layer (``flashlatte.layers``) with the model's own
    projections, and stores latents in a paged cache. Prefill attends in multi-head form (``dense_prefill``), decode in
    absorbed form (``dense_decode``, or ``sparse_decode`` over all tokens for the formats ``v32`` and ``model1``). If an
    indexer selects tokens, prefill and decode attend to the selected tokens in absorbed form. Tokens hidden by the
    attention mask are not stored.

    ``generate`` works as before: greedy, sampling, beams, assisted, prompt lookup, chunked prefill, and continuing
    with the cache of an earlier call. ``generate_batch`` raises a ValueError, since the cache of transformers'
    continuous batching cannot hold latents; use ``flashlatte.engine`` instead.

    DeepSeek-V4 uses ``layers.V4Attention``. It supports the format "model1" and that of the model's dtype, any
    ``attention_mask`` [b, columns], any ``position_ids`` from 0 on, and beams, but no cropping of the cache.

    The model's own attention implementation computes a prefill over the paged cache if the mask does more than hide
    padding on the left, or if the implementation is not transformers' default (PyTorch's SDPA; "eager" for Hy4).

    Layers of linear attention (BailingHybrid, Glm5Next, KimiLinear) run as transformers' modules. Their states stay in
    the cache as transformers' layers, and cannot be cropped. Glm5Next's indexer, which selects pools of tokens, is
    transformers' too. Layers with a window (Dots3Note) attend to the window's slots in absorbed form; the pages keep
    all tokens.

    In training mode (``model.train()``) with gradients, all families except Glm5Next attend with ``dense_prefill``, or
    with ``sparse_attention`` over the tokens that the indexer selects, without a cache. Without a mask,
    ``cu_seq_lens_q`` or jumps of ``position_ids`` separate packed sequences. If the indexers' parameters require
    gradients, the output has ``indexer_loss``, the sum over layers of the mean divergence of an indexer from the
    attention; with ``labels``, ``loss`` includes it times ``indexer_loss_coef``.

    Stock attention computes other passes in training mode, passes that record gradients, passes with
    ``output_attentions=True``, without a cache, under autocast to another dtype than the model's, and passes that
    continue with a filled ``DynamicCache``. A paged cache passed to it is converted to a ``DynamicCache`` with the same
    tokens.

    Calling ``enable`` again changes the settings; existing caches keep theirs.

    On a GPU, the weights of the projections of hidden states are moved into one tensor, and the parameters become views
    of it, so that one matrix product computes all projections.

    Warns of weights that the checkpoint lacked and transformers initialized at random.

    Args:
        model: a ``DeepseekV3ForCausalLM``, another model class of that family (``DeepseekV3Model``, …), or a model of
            another supported family.
        cache_format: "bf16", "fp16", "fp32", "fp8", "v32" or "model1"; None: the model's dtype. ``v32`` needs
            kv_lora_rank 512, ``model1`` 448, and both qk_rope_head_dim 64.
        page_size: tokens in a page.
        backend: "hopper", "portable" or "reference" for the decode operation; None selects one. It must support the
            model on its current device.
        k_scale: the scale of format ``fp8``; 1 if None.
        index_format: format of the index keys of models with an indexer, except Glm5Next: "index_fp8", "index_bf16",
            "index_fp32" or "index_mxfp4"; None: ``index_fp8`` with ``v32``, else that of the cache's dtype.
        indexer_loss_coef: factor of the indexers' loss in the model's loss.
        dense_warmup: in training steps, layers with an indexer attend to all tokens, and the indexers' loss is over all
            of them, as in the first stage of DSA's training (arXiv:2512.02556, equation 3). Call ``enable`` again
            without it for the second stage.

    Returns:
        ``model``.

    Raises:
        ImportError: transformers is missing, older than 5.17, or passes caches under an unknown argument name.
        TypeError, ValueError: an unsupported model; a model on the meta device; a wrong argument; ``dense_warmup``
            without an indexer; a latent that does not fit the format; an adapter or hook on a module whose weight is
            read without calling it (``kv_b_proj``, norms of latents, DeepSeek-V4's ``o_a_proj``); attention with other
            parts than MLA's; a quantized weight that cannot be dequantized. A forward pass raises the same, and for a
            cache other than ``DynamicCache`` (``StaticCache``, ``QuantizedCache``, an offloaded one), or an attention
            mask that shows tokens which an earlier mask hid.
    """
    check_transformers()
    _check_loaded(model)
    _check_has_weights(model)
    from flashlatte.integrations.transformers import training
    from flashlatte.integrations.transformers.hooks import Settings
    from flashlatte.integrations.transformers.indexer_losses import LossHooks
    from flashlatte.integrations.transformers.patching import refuse_continuous_batching

    checks.positive_int("page_size", page_size)
    if backend is not None:
        checks.choice("backend", backend, dispatch.backends())
    if k_scale is not None:
        scales.check("k_scale", checks.number("k_scale", k_scale))
    indexer_loss_coef = checks.number("indexer_loss_coef", indexer_loss_coef)
    settings = Settings(
        cache_format, page_size, backend, k_scale, index_format, checks.flag("dense_warmup", dense_warmup)
    )
    loss = LossHooks(training.STEP, indexer_loss_coef)
    v4_decoder = _v4_decoder(model)
    if v4_decoder is None:
        _enable_mla(model, settings, loss)
    else:
        _enable_v4(model, v4_decoder, settings, loss)
    refuse_continuous_batching(model)
    return model


def disable(model: Model) -> Model:
    """Undo ``enable``. Does nothing for a model that is not enabled.

    Caches filled by an enabled model stay usable: stock attention converts them to a ``DynamicCache``.

    Returns:
        ``model``.

    Raises:
        ImportError, TypeError: as ``enable``.
    """
    check_transformers()
    _check_loaded(model)
    from flashlatte.integrations.transformers.attention import paged
    from flashlatte.integrations.transformers.families import attentions, find_decoder
    from flashlatte.integrations.transformers.patching import change_class, restore_continuous_batching

    restore_continuous_batching(model)
    if (v4_decoder := _v4_decoder(model)) is not None:
        if _remove_hooks(v4_decoder):
            from flashlatte.integrations.transformers.v4 import attention as v4

            v4.disable(v4_decoder)
        return model
    decoder, family = find_decoder(model)
    if not _remove_hooks(decoder):
        return model
    for _, module in attentions(decoder, family):
        if type(module) is paged(family):
            change_class(module, family.attention_class)
    return model


def _enable_mla(model: nn.Module, settings: Settings, loss: LossHooks) -> None:
    from flashlatte.integrations.transformers import attention, hooks
    from flashlatte.integrations.transformers.families import find_decoder
    from flashlatte.integrations.transformers.patching import change_class
    from flashlatte.layers.fused_projections import fuse_weights_on_gpu
    from flashlatte.layers.parts import check_parts, check_weights, hidden_projections

    decoder, family = find_decoder(model)
    _check_decoder(model, decoder)
    modules = _attentions(decoder, family)
    hooks.check_backend(decoder, hooks.new_latents(decoder, settings, family), family)
    _check_warmup(settings, hooks.indexer_of(decoder, family) is not None)
    for module in modules:
        check_parts(module)
        check_weights(module, decoder.dtype)

    disable(model)
    fuse_weights_on_gpu(map(hidden_projections, modules))
    for module in modules:
        change_class(module, attention.paged(family))
    _keep_hooks(model, decoder, hooks.register(decoder, hooks.BeginForward(family, settings), loss), loss)


def _enable_v4(model: nn.Module, decoder: Any, settings: Settings, loss: LossHooks) -> None:
    from flashlatte.integrations.transformers.v4 import attention
    from flashlatte.layers.v4 import V4Config

    _check_decoder(model, decoder)
    _check_warmup(settings, any(config.indexer is not None for config in V4Config.layers(decoder.config)))
    disable(model)
    _keep_hooks(model, decoder, attention.enable(decoder, settings, loss), loss)


def _check_warmup(settings: Settings, has_indexer: bool) -> None:
    if settings.dense_warmup and not has_indexer:
        raise ValueError("dense_warmup must be False for a model without an indexer that trains, got True")


def _check_decoder(model: nn.Module, decoder: Any) -> None:
    from flashlatte.integrations.transformers.calls import check_cache_argument
    from flashlatte.layers.missing_weights import warn_of_missing

    check_cache_argument(decoder)
    warn_of_missing(decoder, getattr(model, "lm_head", None))


def _keep_hooks(model: nn.Module, decoder: Any, registered: list[Any], loss: LossHooks) -> None:
    if model is not decoder:
        registered.append(model.register_forward_hook(loss.end_model))
    decoder._flashlatte_hooks = registered


def _remove_hooks(decoder: Any) -> bool:
    """Remove the hooks of ``enable``. Returns whether the decoder was enabled."""
    registered = decoder.__dict__.pop("_flashlatte_hooks", None)
    for hook in registered or ():
        hook.remove()
    return registered is not None


def _check_loaded(model: object) -> None:
    """Raise TypeError for a checkpoint's name or another object instead of a model."""
    if not isinstance(model, nn.Module):
        what = repr(model) if isinstance(model, str) else type(model).__name__
        raise TypeError(f"model must be a transformers model, as from_pretrained loads it, got {what}")


def _check_has_weights(model: nn.Module) -> None:
    """Raise ValueError for weights on the meta device, unless accelerate offloads them."""
    if not any("_hf_hook" in module.__dict__ for module in model.modules()):
        for name, weight in model.named_parameters():
            if weight.is_meta:
                raise ValueError(
                    f"model must have weights, as from_pretrained loads them, got {name} on the meta device"
                )


def _v4_decoder(model: nn.Module) -> Any:
    """The DeepSeek-V4 decoder within a model, or None; its module is imported if such a model exists."""
    host = sys.modules.get("transformers.models.deepseek_v4.modeling_deepseek_v4")
    found = [] if host is None else [module for module in model.modules() if isinstance(module, host.DeepseekV4Model)]
    return found[0] if len(found) == 1 else None


def check_transformers() -> None:
    """Raise ImportError unless a supported version of transformers is installed."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            f"this needs transformers {OLDEST_TRANSFORMERS} or later: pip install 'flashlatte[transformers]'"
        ) from error
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if version < tuple(int(part) for part in OLDEST_TRANSFORMERS.split(".")):
        raise ImportError(
            f"this needs transformers {OLDEST_TRANSFORMERS} or later, and {transformers.__version__} is installed"
        )


def _attentions(decoder: Any, family: Family) -> list[Any]:
    """The decoder's attention modules. Raise TypeError unless each has the family's class, or FlashLatte's."""
    from flashlatte.integrations.transformers.attention import paged
    from flashlatte.integrations.transformers.families import attentions, check_selections
    from flashlatte.integrations.transformers.patching import check_forward
    from flashlatte.layers.parts import check_sources

    stock, modules = family.attention_class, []
    for index, module in attentions(decoder, family):
        if type(module) not in (stock, paged(family)):
            raise TypeError(f"layer {index}'s attention must be a {stock.__name__}, got {type(module).__name__}")
        check_forward(module, index)
        modules.append(module)
    check_sources(modules)
    check_selections(modules, family)
    return modules
