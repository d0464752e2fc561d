"""The table of SGLang's functions and their replacements."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from flashlatte import deep_gemm
from flashlatte.integrations import decode_precision
from flashlatte.integrations.sglang import attention, fa3, indexer, start


class Hook(NamedTuple):
    """A function of SGLang and its replacement.

    Attributes:
        target: dotted name of SGLang's function.
        function: the replacement.
        around: whether ``function`` takes the original as its first argument, for calls that it does not support.
        optional: whether a missing target needs no warning.
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
    # Before 0.5.23 these are in sgl-kernel, which still has them.
    *(
        Hook(f"{module}.{function.__name__}", function)
        for module in ("sglang.kernels.ops.attention.flash_mla_interface", "sgl_kernel.flash_mla")
        for function in (attention.flash_mla_with_kvcache, attention.flash_mla_sparse_fwd, attention.get_mla_metadata)
    ),
    Hook(f"{_DSA_BACKEND}._forward_fa3", fa3.forward_fa3),
    Hook(f"{_DSA_BACKEND}._forward_flashmla_sparse", attention.forward_flashmla_sparse, around=False),
    # DeepGEMM's functions, which SGLang calls directly, and since 0.5.22 through resolver functions. DeepGEMM itself is
    # optional.
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
    # The default of prefill, with a start for each row. SGLang imports these two at the call.
    Hook("sgl_kernel.fast_topk_transform_fused", indexer.fast_topk_transform_fused),
    Hook("sgl_kernel.fast_topk_transform_ragged_fused", indexer.fast_topk_transform_ragged_fused),
    Hook(f"{_TOPK}.topk_transform_paged_v2", indexer.topk_transform_paged_v2),
    # The names of topk_transform_paged_v2 before 0.5.20 and before 0.5.17.
    Hook(f"{_TOPK}.topk_transform_512_v2", indexer.topk_transform_paged_v2),
    Hook("sglang.jit_kernel.dsv4.topk.topk_transform_512_v2", indexer.topk_transform_paged_v2),
    # Before 0.5.19 SGLang calls the two sgl-kernel functions instead.
    Hook(f"{_TOPK}.topk_transform_ragged_v2", indexer.topk_transform_ragged_v2, optional=True),
)

# Only with FLASHLATTE_DECODE_PRECISION: SGLang imports this module late.
START = Hook(
    "sglang.srt.model_executor.model_runner.ModelRunner.init_attention_backends", start.init_attention_backends
)


def active_hooks() -> tuple[Hook, ...]:
    """The hooks to register."""
    return (*HOOKS, START) if os.environ.get(decode_precision.VARIABLE) else HOOKS


def missing_targets(exists: Callable[[Hook], bool]) -> list[str]:
    """Targets of replacements that are not in use: ``exists`` is False for all targets of the function."""
    hooks = active_hooks()
    in_use = {hook.function for hook in hooks if exists(hook)}
    first = {hook.function: hook.target for hook in reversed(hooks) if not hook.optional}
    return [target for function, target in first.items() if function not in in_use][::-1]
