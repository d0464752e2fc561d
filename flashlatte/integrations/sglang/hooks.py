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
        optional: without the target nothing is left unserved.
    """

    target: str
    function: Callable[..., Any]
    around: bool = True
    optional: bool = False


_TOPK = "sglang.kernels.ops.attention.dsv4.topk"
_DSA = "sglang.srt.layers.attention.dsa"
_DSA_BACKEND = "sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnBackend"

_LOGITS = ("fp8_mqa_logits", "fp8_paged_mqa_logits", "fp8_fp4_mqa_logits", "fp8_fp4_paged_mqa_logits")

HOOKS = (
    # Before 0.5.23 these are sgl-kernel's, which has them still.
    *(
        Hook(f"{module}.{function.__name__}", function)
        for module in ("sglang.kernels.ops.attention.flash_mla_interface", "sgl_kernel.flash_mla")
        for function in (attention.flash_mla_with_kvcache, attention.flash_mla_sparse_fwd, attention.get_mla_metadata)
    ),
    Hook(f"{_DSA_BACKEND}._forward_fa3", fa3.forward_fa3),
    Hook(f"{_DSA_BACKEND}._forward_flashmla_sparse", attention.forward_flashmla_sparse, around=False),
    # DeepGEMM's functions where SGLang names them itself, and, since 0.5.22, where it asks which to take. DeepGEMM need
    # not be installed.
    *(Hook(f"deep_gemm.{name}", getattr(deep_gemm, name), around=False, optional=True) for name in _LOGITS),
    Hook("deep_gemm.get_paged_mqa_logits_metadata", indexer.get_paged_mqa_logits_metadata, optional=True),
    Hook(f"{_DSA}.utils.resolve_fp8_mqa_logits_fn", indexer.resolve_fp8_mqa_logits_fn, optional=True),
    Hook(f"{_DSA}.utils.resolve_fp8_paged_mqa_logits_fn", indexer.resolve_fp8_paged_mqa_logits_fn, optional=True),
    Hook(
        f"{_DSA}.utils.resolve_paged_mqa_logits_metadata_fn",
        indexer.resolve_paged_mqa_logits_metadata_fn,
        optional=True,
    ),
    Hook(f"{_DSA}.utils.resolve_num_sms", deep_gemm.get_num_sms, around=False, optional=True),
    Hook(f"{_DSA}.dsa_topk_backend.DSATopKBackend.topk_func", indexer.topk_func),
    # Imported where it is called: what prefill takes by default, whose rows begin anywhere.
    Hook("sgl_kernel.fast_topk_transform_fused", indexer.fast_topk_transform_fused),
    Hook("sgl_kernel.fast_topk_transform_ragged_fused", indexer.fast_topk_transform_ragged_fused),
    Hook(f"{_TOPK}.topk_transform_paged_v2", indexer.topk_transform_paged_v2),
    # Its names before 0.5.20 and before 0.5.17.
    Hook(f"{_TOPK}.topk_transform_512_v2", indexer.topk_transform_paged_v2),
    Hook("sglang.jit_kernel.dsv4.topk.topk_transform_512_v2", indexer.topk_transform_paged_v2),
    # Before 0.5.19 sgl-kernel's two do its work.
    Hook(f"{_TOPK}.topk_transform_ragged_v2", indexer.topk_transform_ragged_v2, optional=True),
)


def unserved(exists: Callable[[Hook], bool]) -> list[str]:
    """Targets, by name, whose function serves nothing, as ``exists`` knows none of the places where it stands."""
    there = {hook.function for hook in HOOKS if exists(hook)}
    first = {hook.function: hook.target for hook in reversed(HOOKS) if not hook.optional}
    return [target for function, target in first.items() if function not in there][::-1]
