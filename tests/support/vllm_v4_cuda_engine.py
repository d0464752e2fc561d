"""The engine process of ``flashlatte bench vllm-steps`` with DeepSeek-V4's layers for CUDA on a CPU.

The model, its attention layers, compressor, indexer and metadata are vLLM's for CUDA; its Triton kernels run in the
interpreter (``TRITON_INTERPRET=1``). FlashLatte's references are in place of FlashMLA and of DeepGEMM's logits, vLLM's
function for CPUs in place of the compiled one for norm, rotation and cache write. Experts are vLLM's for CPUs.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
import types
from typing import Any

import torch
import triton.backends

OPTIONS = {
    "enforce_eager": True,
    "kv_cache_memory_bytes": 256 << 20,
    "max_num_batched_tokens": 64,
    "block_size": 256,
    "compilation_config": {"custom_ops": ["none"]},
    "kernel_config": {"sparse_indexer_topk_backend": "torch"},
    "model_class_overrides": {"DeepseekV4ForCausalLM": "support.vllm_v4_cuda_engine:DeepseekV4ForCausalLM"},
}


def __getattr__(name: str) -> Any:
    """``DeepseekV4ForCausalLM``, which ``model_class_overrides`` names."""
    if name != "DeepseekV4ForCausalLM":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    prepare()
    from vllm.models.deepseek_v4.nvidia import model

    return model.DeepseekV4ForCausalLM


@functools.cache
def prepare() -> None:
    """Replace what needs a GPU in vLLM's layers."""
    from vllm import _custom_ops
    from vllm.model_executor.layers import sparse_attn_indexer, utils
    from vllm.models.deepseek_v4 import attention
    from vllm.models.deepseek_v4.nvidia import flashmla
    from vllm.v1.attention.backends.mla import indexer, sparse_swa
    from vllm.v1.worker.utils import KVBlockZeroer
    from vllm.v1.worker.workspace import init_workspace_manager

    from flashlatte import flash_mla

    init_workspace_manager(torch.device("cpu"))
    KVBlockZeroer.zero_block_ids = lambda *_: None  # new pages are written before they are read
    # vLLM's matrix products for CPUs keep packed weights only, and the layers read weights.
    utils.dispatch_cpu_unquantized_gemm = lambda layer, **_: setattr(layer, "cpu_linear", torch.nn.functional.linear)
    torch.mm = _mm
    torch.cuda.is_current_stream_capturing = lambda: False
    sparse_attn_indexer.SparseAttnIndexer.forward_cpu = sparse_attn_indexer.SparseAttnIndexer.forward_cuda
    indexer.num_compute_units = lambda *_: 132
    attention.execute_in_parallel = lambda first, others, *_, **__: (first(), [one and one() for one in others])
    attention.maybe_execute_in_parallel = lambda first, second, *_: (first(), second())
    flashmla.compute_fp8_einsum_recipe = lambda: ((1, 128, 128), False)
    flashmla.flash_mla_with_kvcache = flash_mla.flash_mla_with_kvcache
    sparse_swa.get_mla_metadata = flash_mla.get_mla_metadata

    library = torch.library.Library("_C", "FRAGMENT")
    name = "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert"
    library.define(
        f"{name}(Tensor q, Tensor kv, Tensor(a!) cache, Tensor slots, Tensor positions, Tensor cos_sin, int heads, "
        "float eps, int block_size) -> Tensor"
    )

    def insert(q: Any, kv: Any, cache: Any, slots: Any, positions: Any, *others: Any) -> torch.Tensor:
        return _custom_ops.fused_qnorm_rope_kv_insert_cpu(q, kv, positions, cache, slots, *others)

    library.impl(name, insert, "CPU")
    prepare.library = library  # pyright: ignore[reportFunctionMemberAccess]  (an operation lives as long as this)


_mm_of_torch = torch.mm


def _mm(
    one: torch.Tensor, other: torch.Tensor, *, out_dtype: torch.dtype | None = None, **options: Any
) -> torch.Tensor:
    """``out_dtype`` needs a GPU."""
    if out_dtype is None:
        return _mm_of_torch(one, other, **options)
    return _mm_of_torch(one.to(out_dtype), other.to(out_dtype))


def main() -> None:
    # vLLM requires Triton for CPUs; the interpreter takes its place.
    never = types.SimpleNamespace(is_active=lambda: False)
    triton.backends.backends["cpu"] = types.SimpleNamespace(driver=never)

    from flashlatte.bench.serving.engine_process import answer_requests
    from flashlatte.bench.serving.vllm_engine import OURS, EngineSteps
    from flashlatte.bench.serving.vllm_v4_parts import replace_missing_parts
    from flashlatte.integrations.vllm import support
    from flashlatte.runtime import dispatch

    # With the interpreter enabled, FlashLatte would choose its Triton kernels.
    select = dispatch.select
    dispatch.select = lambda call, backend=None: select(call, backend or "reference")
    support.V4_MODELS = ()  # refused on a CPU
    replace_missing_parts()  # before vLLM's layers are imported here
    # By its name, which vLLM imports, and not as __main__.
    importlib.import_module("support.vllm_v4_cuda_engine").prepare()
    if json.loads(sys.argv[1])["backend"] == OURS:
        from flashlatte.integrations.vllm.backends import v4, v4_indexer

        v4.install()
        v4_indexer.install()
    answer_requests(EngineSteps)


if __name__ == "__main__":
    main()
