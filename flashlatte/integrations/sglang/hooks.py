"""Which functions of SGLang are served by which of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from flashlatte import deep_gemm
from flashlatte.integrations.sglang import attention, fa3, indexer


class Hook(NamedTuple):
    """A function of SGLang's by its dotted name, and what takes its place.

    Attributes:
        around: ``function`` is given the original first, for calls that it leaves to it.
    """

    target: str
    function: Callable[..., Any]
    around: bool


_FLASH_MLA = "sglang.kernels.ops.attention.flash_mla_interface"
_TOPK = "sglang.kernels.ops.attention.dsv4.topk"
_DSA = "sglang.srt.layers.attention.dsa"
_DSA_BACKEND = "sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnBackend"

_LOGITS = ("fp8_mqa_logits", "fp8_paged_mqa_logits", "fp8_fp4_mqa_logits", "fp8_fp4_paged_mqa_logits")

HOOKS = (
    Hook(f"{_FLASH_MLA}.flash_mla_with_kvcache", attention.flash_mla_with_kvcache, around=True),
    Hook(f"{_FLASH_MLA}.flash_mla_sparse_fwd", attention.flash_mla_sparse_fwd, around=True),
    Hook(f"{_FLASH_MLA}.get_mla_metadata", attention.get_mla_metadata, around=True),
    Hook(f"{_DSA_BACKEND}._forward_fa3", fa3.forward_fa3, around=True),
    # DeepGEMM's functions where SGLang names them itself, and where it asks which to take.
    *(Hook(f"deep_gemm.{name}", getattr(deep_gemm, name), around=False) for name in _LOGITS),
    Hook("deep_gemm.get_paged_mqa_logits_metadata", deep_gemm.get_paged_mqa_logits_metadata, around=False),
    Hook(f"{_DSA}.utils.resolve_fp8_mqa_logits_fn", indexer.resolve_fp8_mqa_logits_fn, around=False),
    Hook(f"{_DSA}.utils.resolve_fp8_paged_mqa_logits_fn", indexer.resolve_fp8_paged_mqa_logits_fn, around=False),
    Hook(
        f"{_DSA}.utils.resolve_paged_mqa_logits_metadata_fn",
        indexer.resolve_paged_mqa_logits_metadata_fn,
        around=False,
    ),
    Hook(f"{_DSA}.utils.resolve_num_sms", deep_gemm.get_num_sms, around=False),
    Hook(f"{_DSA}.dsa_topk_backend.DSATopKBackend.topk_func", indexer.topk_func, around=True),
    # Imported where it is called: what prefill takes by default, whose rows begin anywhere.
    Hook("sgl_kernel.fast_topk_transform_fused", indexer.fast_topk_transform_fused, around=True),
    Hook("sgl_kernel.fast_topk_transform_ragged_fused", indexer.fast_topk_transform_ragged_fused, around=True),
    Hook(f"{_TOPK}.topk_transform_paged_v2", indexer.topk_transform_paged_v2, around=True),
    Hook(f"{_TOPK}.topk_transform_ragged_v2", indexer.topk_transform_ragged_v2, around=True),
)
