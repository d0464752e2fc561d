"""FlashMLA's interface, argument for argument: ``import flashlatte.flash_mla as flash_mla``.

Conventions are FlashMLA's (lse of a row without keys is +inf), and what FlashMLA refuses only because its kernels
cannot is accepted: any number of heads, any page size, per-tensor fp8 caches and queries in dense decode (with the
``descale_q`` and ``descale_k`` of vLLM and SGLang), bf16 caches and any number of indices in sparse decode.
Contradictory arguments are errors here as there, as ``ValueError`` or ``TypeError``.

``python -m flashlatte.flash_mla --install-alias DIR`` writes a package ``flash_mla`` into DIR that forwards to this
module, for programs that import the top-level name.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from flashlatte.flash_attn_varlen import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from flashlatte.kv_cache import scales
from flashlatte.kv_cache.registry import format_of_width
from flashlatte.ops.dense_decode import dense_decode
from flashlatte.ops.sparse_decode import sparse_decode
from flashlatte.ops.sparse_prefill import sparse_prefill
from flashlatte.runtime import alias, checks
from flashlatte.runtime.repeat import repeats_launches

__all__ = [
    "FlashMLASchedMeta",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
]

# FlashMLA's own at commit 9241ae3, whose interface this is, for programs that ask for one.
__version__ = "1.0.0"

ALIAS = '''"""The top-level name of FlashMLA, served by FlashLatte."""

from flashlatte.flash_mla import *  # noqa: F403
from flashlatte.flash_mla import __version__  # noqa: F401
'''

ALIAS_INTERFACE = '''"""FlashMLA's module path for its functions, served by FlashLatte."""

from flashlatte.flash_mla import *  # noqa: F403
'''


ALIAS_FILES = {"__init__.py": ALIAS, "flash_mla_interface.py": ALIAS_INTERFACE}


@dataclass
class FlashMLASchedMeta:
    """What FlashMLA caches its schedule in. Here work is split anew in each call, from the lengths of that call, so
    the object holds nothing: it may be reused with other lengths and other shapes.
    """

    have_initialized: bool = False
    config: object | None = None
    tile_scheduler_metadata: torch.Tensor | None = None
    num_splits: torch.Tensor | None = None


def get_mla_metadata(*_args: object, **_kwargs: object) -> tuple[FlashMLASchedMeta, None]:
    """A schedule object for ``flash_mla_with_kvcache``, and None.

    Like FlashMLA's, it takes the arguments of earlier FlashMLA versions (lengths, heads, …) and has no use for them.
    """
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    *,
    descale_q: float | torch.Tensor | None = None,
    descale_k: float | torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode over a paged latent cache: dense, or over selected tokens if ``indices`` is given.

    Args:
        q: [b, s_q, h_q, d], bf16 or fp16 (float32 on the reference); dense also float8_e4m3fn; d 576 or 512.
        k_cache: dense: [pages, page_size, h_kv, d] in q's dtype, or float8_e4m3fn with ``is_fp8_kvcache``; sparse:
            [pages, page_size, 1, 656 or 584] one-byte with ``is_fp8_kvcache``, 528 (DeepSeek-V4.1) with or without, or
            [pages, page_size, 1, d] in q's dtype without.
        block_table: dense: int32 or int64 [b, max_pages]. Sparse indices are cache positions already, so sparse
            decode has no use for it, whatever it is.
        cache_seqlens: dense: int32 or int64 [b]. No use in sparse decode, as ``block_table``.
        head_dim_v: width of a value (512).
        tile_scheduler_metadata: what ``get_mla_metadata`` returned; may be reused for any call.
        num_splits: None, as ``get_mla_metadata`` returned.
        softmax_scale: above 0; d^-0.5 if None.
        causal: dense only; bottom-right: query token j sees keys 0 to cache_seqlens - s_q + j.
        is_fp8_kvcache: whether k_cache holds one-byte numbers; must agree with its dtype. ``descale_k`` says so too.
        indices: sparse: int32 or int64 [b, s_q, topk], page · page_size + offset; values outside the cache (FlashMLA
            knows only -1) select nothing.
        attn_sink: sparse: float32 [h_q]; out is scaled by e^lse / (e^lse + e^sink), lse is not.
        extra_k_cache, extra_indices_in_kvcache: sparse: a second cache in the same format, or 288 wide beside 528, and
            its indices.
        topk_length, extra_topk_length: sparse: int32 or int64 [b] or [b, s_q], how many indices count.
        descale_q: dense with a float8_e4m3fn q: query = byte · descale_q, rounded to bf16; a number or a one-element
            float32 tensor; default 1.
        descale_k: dense over a float8_e4m3fn cache: key = byte · descale_k; as ``descale_q``.
        out: [b, s_q, h_q, head_dim_v] in q's dtype to write into.
        lse: float32 [b, h_q, s_q] to write into.
        backend: "hopper", "portable" or "reference"; None chooses.

    Returns:
        out [b, s_q, h_q, head_dim_v] in q's dtype (bf16 for a float8_e4m3fn q), and lse, natural logarithm, float32
        [b, h_q, s_q] with strides (s_q · h_q, 1, h_q). A row that sees no key: out 0, lse +inf.

    Raises:
        TypeError, ValueError: arguments of a wrong type, dtype, shape, stride or device, or that contradict each
            other.
    """
    if not isinstance(tile_scheduler_metadata, FlashMLASchedMeta):
        raise TypeError(
            "tile_scheduler_metadata must be the FlashMLASchedMeta that get_mla_metadata returned, "
            f"got {type(tile_scheduler_metadata).__name__}"
        )
    if num_splits is not None:
        raise ValueError(f"num_splits must be None, as get_mla_metadata returned it, got {type(num_splits).__name__}")
    if indices is None:
        for name, value in (
            ("attn_sink", attn_sink),
            ("extra_k_cache", extra_k_cache),
            ("extra_indices_in_kvcache", extra_indices_in_kvcache),
            ("topk_length", topk_length),
            ("extra_topk_length", extra_topk_length),
        ):
            if value is not None:
                raise ValueError(f"{name} belongs to sparse decode and needs indices beside it, got {name} alone")
        if block_table is None or cache_seqlens is None:
            missing = "block_table" if block_table is None else "cache_seqlens"
            raise ValueError(f"{missing} must be given for dense decode (without indices), got None")
        return _dense(
            q,
            k_cache,
            block_table,
            cache_seqlens,
            head_dim_v,
            softmax_scale,
            causal,
            is_fp8_kvcache,
            descale_q,
            descale_k,
            out,
            lse,
            backend,
        )
    if checks.flag("causal", causal):
        raise ValueError("causal must be False in sparse decode (with indices), whose mask is the indices; got True")
    for name, value in (("descale_q", descale_q), ("descale_k", descale_k)):
        if value is not None:
            raise ValueError(f"{name} belongs to dense decode over an fp8 cache, got it with indices")
    return _sparse(
        q,
        k_cache,
        indices,
        topk_length,
        attn_sink,
        extra_k_cache,
        extra_indices_in_kvcache,
        extra_topk_length,
        softmax_scale,
        head_dim_v,
        is_fp8_kvcache,
        out,
        lse,
        backend,
    )


@repeats_launches
def _dense(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    head_dim_v: int,
    softmax_scale: float | None,
    causal: bool,
    is_fp8_kvcache: bool,
    descale_q: float | torch.Tensor | None,
    descale_k: float | torch.Tensor | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    backend: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``dense_decode`` with FlashMLA's arguments. What reads a tensor stands here, where a repeat leaves it out."""
    _check_fp8_flag(k_cache, is_fp8_kvcache, descale_k)
    q = _query(q, descale_q)
    with checks.naming(k_scale="descale_k"):
        return dense_decode(
            q,
            k_cache,
            block_table,
            cache_seqlens,
            head_dim_v=head_dim_v,
            softmax_scale=softmax_scale,
            causal=causal,
            k_scale=descale_k,
            out=out,
            lse=lse,
            empty_lse=math.inf,
            backend=backend,
        )


@repeats_launches
def _sparse(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    topk_length: torch.Tensor | None,
    attn_sink: torch.Tensor | None,
    extra_k_cache: torch.Tensor | None,
    extra_indices: torch.Tensor | None,
    extra_topk_length: torch.Tensor | None,
    softmax_scale: float | None,
    head_dim_v: int,
    is_fp8_kvcache: bool,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    backend: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``sparse_decode`` with FlashMLA's arguments, as ``_dense``."""
    _check_fp8_flag(k_cache, is_fp8_kvcache, None)
    with checks.naming(extra_indices="extra_indices_in_kvcache"):
        return sparse_decode(
            q,
            k_cache,
            indices,
            topk_length=topk_length,
            attn_sink=attn_sink,
            extra_k_cache=extra_k_cache,
            extra_indices=extra_indices,
            extra_topk_length=extra_topk_length,
            softmax_scale=softmax_scale,
            head_dim_v=head_dim_v,
            out=out,
            lse=lse,
            empty_lse=math.inf,
            backend=backend,
        )


def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sparse prefill: each query token attends to the tokens of a contiguous latent that it selected.

    Args:
        q: [s_q, h_q, d], bf16 or fp16 (float32 on the reference), d 576 or 512.
        kv: [s_kv, 1, d] in q's dtype.
        indices: int32 or int64 [s_q, 1, topk]; values outside 0 to s_kv - 1 select nothing.
        sm_scale: softmax scale, above 0.
        d_v: width of a value, the first numbers of a row of ``kv``.
        attn_sink: float32 [h_q]; out is scaled by e^lse / (e^lse + e^sink), lse is not.
        topk_length: int32 or int64 [s_q], how many indices count.
        out: [s_q, h_q, d_v] in q's dtype to write into.
        backend: "hopper", "portable" or "reference"; None chooses.

    Returns:
        out [s_q, h_q, d_v] in q's dtype; max_logits and lse, natural logarithm, float32 [s_q, h_q]. A row that selects
        nothing: out 0, max_logits -inf, lse +inf.

    Raises:
        TypeError, ValueError: arguments of a wrong type, dtype, shape, stride or device, or that contradict each
            other.
    """
    with checks.naming(softmax_scale="sm_scale"):
        return sparse_prefill(
            q,
            kv,
            indices,
            sm_scale,
            d_v=d_v,
            attn_sink=attn_sink,
            topk_length=topk_length,
            out=out,
            empty_lse=math.inf,
            backend=backend,
        )


def _query(q: torch.Tensor, descale_q: float | torch.Tensor | None) -> torch.Tensor:
    """q as it is, or byte · descale_q in bf16."""
    if not isinstance(q, torch.Tensor) or q.dtype != torch.float8_e4m3fn:
        if descale_q is not None:
            raise ValueError(f"descale_q belongs to a float8_e4m3fn q, and this one is {_kind(q)}")
        return q
    tensor, number = scales.split("descale_q", descale_q, q.device)
    return (q.float() * (number if tensor is None else tensor)).to(torch.bfloat16)


def _kind(value: object) -> str:
    return checks.dtype_names([value.dtype]) if isinstance(value, torch.Tensor) else type(value).__name__


def _check_fp8_flag(k_cache: object, is_fp8_kvcache: bool, descale_k: object) -> None:
    if not isinstance(is_fp8_kvcache, bool):
        raise TypeError(f"is_fp8_kvcache must be True or False, got {is_fp8_kvcache!r}")
    if not isinstance(k_cache, torch.Tensor):
        return
    one_byte = k_cache.dtype.itemsize == 1
    layout = format_of_width(k_cache) if k_cache.dim() else None
    if layout is not None and layout.block_scaling is not None:
        # FlashMLA for DeepSeek-V4.1, which brought such caches, has no such argument.
        return
    if one_byte != is_fp8_kvcache and not (one_byte and descale_k is not None):
        raise ValueError(
            f"is_fp8_kvcache must say whether k_cache holds one-byte numbers: it is {is_fp8_kvcache}, and k_cache is "
            f"{_kind(k_cache)}"
        )


def install_alias(directory: Path) -> Path:
    """Write the package ``flash_mla`` into a directory; returns its path. Refuses to replace another ``flash_mla``."""
    return alias.install(directory, "flash_mla", ALIAS_FILES)


def main(argv: list[str] | None = None) -> int:
    return alias.main("flashlatte.flash_mla", (__doc__ or "").split("\n")[0], "flash_mla", ALIAS_FILES, argv)


if __name__ == "__main__":
    sys.exit(main())
