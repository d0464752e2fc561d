"""FlashLatte in Hugging Face transformers: ``enable`` an MLA model, ``disable`` it again.

>>> from flashlatte.integrations.transformers import enable
>>> enable(model)
>>> model.generate(**inputs)
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from flashlatte.kv_cache import scales
from flashlatte.runtime import checks, dispatch

if TYPE_CHECKING:
    from flashlatte.integrations.transformers.families import Family
    from flashlatte.kv_cache import CacheFormat

__all__ = ["disable", "enable"]

OLDEST_TRANSFORMERS = "5.17"

Model = TypeVar("Model", bound=nn.Module)


@dataclass
class _Enabled:
    """What ``disable`` has to undo, kept on the decoder."""

    hooks: list[Any]


def enable(
    model: Model,
    cache_format: str | CacheFormat | None = None,
    page_size: int = 64,
    backend: str | None = None,
    k_scale: float | None = None,
    index_format: str | None = None,
) -> Model:
    """Let FlashLatte keep the cache and compute the attention of a transformers MLA model, in place.

    DeepSeek-V4's windows and compressed groups are kept likewise (``layers.V4Attention``): formats "model1" and that of
    the model's dtype; any ``attention_mask`` [b, columns] and any ``position_ids`` from 0 on; beams, but nothing that
    takes tokens back. Otherwise served are the families AXK1, DeepseekV2, DeepseekV3 (with Kimi-K2), DeepseekV32,
    Glm4MoeLite, GlmMoeDsa (GLM-5), LongcatFlash, MiniCPM3, Mistral4 and Youtu, and models that hold one of them as
    their language model, such as Kimi-K2.5.

    A forward pass with a cache is then FlashLatte's MLA layer (``flashlatte.layers``) with the model's own projections.
    It writes the latent of its tokens into a paged cache. Prefill attends in multi-head form, by ``dense_prefill``;
    decode attends in absorbed form, by ``dense_decode``, or over all tokens by ``sparse_decode`` if the format is
    ``v32`` or ``model1``. Where an indexer selects tokens, both attend in absorbed form to those. Tokens that the
    attention mask hides are not stored. ``generate`` works as before: greedy, sampled, beams, assisted, prompt lookup,
    chunked prefill, and going on with the cache of an earlier call. ``generate_batch`` raises a ValueError:
    transformers' continuous batching has a cache of its own, which holds no latents. ``flashlatte.engine`` replaces it.

    The model's own attention implementation computes a prefill over the paged cache where a mask tells more than which
    tokens are padding on the left, and where it was set to another than PyTorch's SDPA.

    Stock attention still serves a pass in training mode, one that records gradients, one with
    ``output_attentions=True``, one without a cache, one under autocast to another dtype than the model's, and one that
    goes on with a filled ``DynamicCache``. A paged cache handed to it becomes a ``DynamicCache`` with the same tokens.

    Enabling an enabled model changes its settings; caches that exist keep theirs.

    On a GPU the weights of the projections that see a layer's hidden states are moved into one tensor, whose parts the
    parameters are from then on: one matrix product serves all of them.

    Warns of weights that the checkpoint lacked and transformers initialised at random, when the model was loaded.

    Args:
        model: a ``DeepseekV3ForCausalLM``, another model of that family (``DeepseekV3Model``, …), or of another.
        cache_format: "bf16", "fp16", "fp32", "fp8", "v32" or "model1"; None takes the model's dtype. ``v32`` needs
            kv_lora_rank 512, ``model1`` 448, and both qk_rope_head_dim 64.
        page_size: tokens in a page.
        backend: "hopper", "portable" or "reference" for the decode operation; None chooses. It must serve the model
            where the model is now.
        k_scale: the one scale of format ``fp8``, 1 if None.
        index_format: of the index keys of DeepseekV32 and GlmMoeDsa: "index_fp8", "index_bf16", "index_fp32" or
            "index_mxfp4"; None takes ``index_fp8`` beside ``v32``, else that of the cache's dtype.

    Returns:
        ``model``.

    Raises:
        ImportError: transformers is missing, older than 5.17, or hands caches on under a name that is not known.
        TypeError, ValueError: another model, an argument that is not accepted, a latent that does not fit the format,
            or an adapter or hook on a module whose weight is read and not called (``kv_b_proj``, norms of latents,
            DeepSeek-V4's ``o_a_proj``), or a weight that is quantised in a way that does not tell its matrix. Later,
            from a forward pass: the same, another kind of cache than ``DynamicCache`` (``StaticCache``,
            ``QuantizedCache``, an offloaded one), or an attention mask that asks for tokens it hid before.
    """
    check_transformers()
    _check_loaded(model)
    from flashlatte.integrations.transformers import attention, continuous_batching, hooks
    from flashlatte.integrations.transformers.calls import check_cache_argument
    from flashlatte.integrations.transformers.classes import change_class
    from flashlatte.integrations.transformers.families import find_decoder
    from flashlatte.layers.forward import check_weights, hidden_projections
    from flashlatte.layers.missing import warn_of_missing
    from flashlatte.layers.side_by_side import lay_on_gpus

    checks.positive_int("page_size", page_size)
    if backend is not None:
        checks.choice("backend", backend, dispatch.backends())
    if k_scale is not None:
        scales.check("k_scale", checks.number("k_scale", k_scale))
    settings = hooks.Settings(cache_format, page_size, backend, k_scale, index_format)
    if (v4_decoder := _v4_decoder(model)) is not None:
        from flashlatte.integrations.transformers.v4 import attention as v4

        check_cache_argument(v4_decoder)
        warn_of_missing(v4_decoder, getattr(model, "lm_head", None))
        disable(model)
        v4_decoder._flashlatte = _Enabled(v4.enable(v4_decoder, settings))
        continuous_batching.refuse(model)
        return model
    decoder, family = find_decoder(model)
    check_cache_argument(decoder)
    warn_of_missing(decoder, getattr(model, "lm_head", None))
    hooks.check_backend(decoder, hooks.new_latents(decoder, settings))
    modules = _attentions(decoder, family)
    for module in modules:
        check_weights(module, decoder.dtype)

    disable(model)
    lay_on_gpus(map(hidden_projections, modules))
    for module in modules:
        change_class(module, attention.paged(family))
    decoder._flashlatte = _Enabled(
        [
            decoder.register_forward_pre_hook(hooks.BeginForward(family, settings), with_kwargs=True),
            decoder.register_forward_hook(hooks.end_forward, with_kwargs=True),
        ]
    )
    continuous_batching.refuse(model)
    return model


def disable(model: Model) -> Model:
    """Undo ``enable``: the model is as it was. A model that is not enabled stays as it is.

    Caches that an enabled model filled go on to work: stock attention turns them into a ``DynamicCache``.

    Returns:
        ``model``.

    Raises:
        ImportError, TypeError: as ``enable``.
    """
    check_transformers()
    _check_loaded(model)
    from flashlatte.integrations.transformers import continuous_batching
    from flashlatte.integrations.transformers.attention import paged
    from flashlatte.integrations.transformers.classes import change_class
    from flashlatte.integrations.transformers.families import attentions, find_decoder

    continuous_batching.restore(model)
    if (v4_decoder := _v4_decoder(model)) is not None:
        if "_flashlatte" in vars(v4_decoder):
            from flashlatte.integrations.transformers.v4 import attention as v4

            for hook in v4_decoder.__dict__.pop("_flashlatte").hooks:
                hook.remove()
            v4.disable(v4_decoder)
        return model
    decoder, family = find_decoder(model)
    enabled = decoder.__dict__.pop("_flashlatte", None)
    if enabled is None:
        return model
    for hook in enabled.hooks:
        hook.remove()
    for _, module in attentions(decoder):
        if type(module) is paged(family):
            change_class(module, family.attention_class)
    return model


def _check_loaded(model: object) -> None:
    """A checkpoint's name is what other libraries take in a model's place."""
    if not isinstance(model, nn.Module):
        what = repr(model) if isinstance(model, str) else type(model).__name__
        raise TypeError(f"model must be a transformers model, as from_pretrained loads it, got {what}")


def _v4_decoder(model: nn.Module) -> Any:
    """The DeepSeek-V4 decoder within a model, or None. Whoever holds one has imported its module."""
    host = sys.modules.get("transformers.models.deepseek_v4.modeling_deepseek_v4")
    found = [] if host is None else [module for module in model.modules() if isinstance(module, host.DeepseekV4Model)]
    return found[0] if len(found) == 1 else None


def check_transformers() -> None:
    """Raise ImportError unless a transformers that ``enable`` can work with is installed."""
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
    """The decoder's attention modules, each of which must be of the family's own class (or FlashLatte's)."""
    from flashlatte.integrations.transformers.attention import paged
    from flashlatte.integrations.transformers.classes import check_forward
    from flashlatte.integrations.transformers.families import attentions

    stock, modules = family.attention_class, []
    for index, module in attentions(decoder):
        if type(module) not in (stock, paged(family)):
            raise TypeError(f"layer {index}'s attention must be a {stock.__name__}, got {type(module).__name__}")
        check_forward(module, index)
        modules.append(module)
    return modules
