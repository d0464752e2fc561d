"""FlashMLA's and FlashAttention-3's kernels on the tensors of a workload, called through vLLM's compiled extensions."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from flashlatte.bench.workloads.base import Results
from flashlatte.bench.workloads.dense_decode import DenseDecodeWorkload
from flashlatte.bench.workloads.dense_prefill import DensePrefillWorkload
from flashlatte.bench.workloads.sparse_decode import SparseDecodeWorkload
from flashlatte.bench.workloads.sparse_prefill import SparsePrefillWorkload

FOLDER_VARIABLE = "VLLM_KERNELS"
EXTENSIONS = ("_flashmla_C.abi3.so", "_flashmla_extension_C.abi3.so", "vllm_flash_attn/_vllm_fa3_C.abi3.so")
LATENT, E4M3_MAX = 512, 448.0
# The largest number of splits of a request that vLLM allows FlashAttention-3 in a CUDA graph.
MAX_SPLITS = 32


def load(device: torch.device, *, required: bool = True) -> bool:
    """Load the extensions; returns whether there are peers.

    Raises:
        ValueError: on a GPU, if ``required`` and VLLM_KERNELS names no folder.
    """
    folder = os.environ.get(FOLDER_VARIABLE)
    if device.type != "cuda" or (not folder and not required):
        return False
    if not folder:
        raise ValueError(f"{FOLDER_VARIABLE} must name the folder of an installed vLLM")
    for name in EXTENSIONS:
        torch.ops.load_library(str(Path(folder) / name))
    return True


def flashmla_decode(work: DenseDecodeWorkload):
    plan: list[torch.Tensor | None] = [None, None]
    scale = work.q.shape[-1] ** -0.5

    def run() -> Results:
        out, lse, *new_plan = torch.ops._flashmla_C.dense_decode_fwd(
            work.q, work.k_cache, LATENT, work.cache_seqlens, work.block_table, scale, work.causal, *plan, None
        )
        plan[:] = new_plan
        return {"out": out, "lse": lse}

    return run


def flashmla_e4m3(work: DenseDecodeWorkload):
    batch, s_q, h_q, head_dim = work.q.shape
    plan = torch.ops._flashmla_extension_C.get_mla_decoding_metadata_dense_fp8(work.cache_seqlens, s_q * h_q, 1)
    q_scale = work.q.abs().max().float().reshape(1) / E4M3_MAX
    q = (work.q.float() / q_scale).to(torch.float8_e4m3fn)
    k_scale = torch.tensor([work.k_scale], device=q.device)

    def run() -> Results:
        out, lse = torch.ops._flashmla_extension_C.fwd_kvcache_mla_fp8(
            q,
            work.k_cache,
            LATENT,
            work.cache_seqlens,
            work.block_table,
            head_dim**-0.5,
            work.causal,
            *plan,
            q_scale,
            k_scale,
        )
        return {"out": out, "lse": lse}

    return run


def fa3_decode(work: DenseDecodeWorkload):
    batch, s_q, h_q, head_dim = work.q.shape
    longest, page_size = int(work.cache_seqlens.max()), work.k_cache.shape[1]
    starts = torch.arange(0, batch * s_q + 1, s_q, dtype=torch.int32, device=work.q.device)
    rope, latent = head_dim - LATENT, LATENT
    q = work.q.flatten(0, 1)
    plan = torch.ops._vllm_fa3_C.get_scheduler_metadata(
        batch, s_q, longest, h_q, 1, rope, latent, q.dtype, work.cache_seqlens, starts, *[None] * 4, page_size, 0, True,
        -1, -1, False, MAX_SPLITS, None, 0,
    )  # fmt: skip

    def run() -> Results:
        out, lse, *_ = torch.ops._vllm_fa3_C.fwd(
            q[..., latent:], work.k_cache[..., latent:], work.k_cache[..., :latent], None, None, q[..., :latent], None,
            starts, None, None, None, work.cache_seqlens, s_q, longest, work.block_table, *[None] * 5, *[None] * 3,
            head_dim**-0.5, True, -1, -1, 0.0, True, plan, MAX_SPLITS, None, 0, None, 1, 0, None,
        )  # fmt: skip
        return {"out": out.unflatten(0, (batch, s_q)), "lse": lse.unflatten(1, (batch, s_q)).permute(1, 0, 2)}

    return run


def fa3_prefill(work: DensePrefillWorkload):
    def run() -> Results:
        starts = work.cu_seqlens
        out, lse, *_ = torch.ops._vllm_fa3_C.fwd(
            work.q, work.k, work.v, *[None] * 4, starts, starts, None, None, None, work.longest, work.longest,
            None, *[None] * 5, *[None] * 3, work.q.shape[-1] ** -0.5, work.causal, -1, -1, 0.0, True, None, 0, None, 0,
            None, 1, 0, None,
        )  # fmt: skip
        return {"out": out, "lse": lse.T}

    return run


def flashmla_sparse(work: SparseDecodeWorkload):
    plan: list[torch.Tensor | None] = [None, None]
    extra = work.extra
    more = (None, None, None) if extra is None else (extra.cache, extra.indices, extra.lengths)

    def run() -> Results:
        out, lse, *new_plan = torch.ops._flashmla_C.sparse_decode_fwd(
            work.q, work.main.cache, work.main.indices, None, work.attn_sink, *plan, *more, LATENT,
            work.q.shape[-1] ** -0.5, None,
        )  # fmt: skip
        plan[:] = new_plan
        return {"out": out, "lse": lse}

    return run


def flashmla_prefill(work: SparsePrefillWorkload):
    def run() -> Results:
        scale = work.q.shape[-1] ** -0.5
        out, max_logits, lse = torch.ops._flashmla_C.sparse_prefill_fwd(
            work.q, work.kv, work.indices, scale, LATENT, work.attn_sink, None, None
        )
        return {"out": out, "max_logits": max_logits, "lse": lse}

    return run
