"""vLLM's DeepSeek-V4 for CPUs with the attention of its layers for CUDA, over FlashLatte's functions.

``python -m support.vllm_v4_model MODEL OUT`` runs it, with ``TRITON_INTERPRET=1``: vLLM's Triton kernels, which convert
selections to slots, run in Triton's interpreter. Caches are written by vLLM's compiled functions for CPUs.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from pathlib import Path
from typing import Any

import torch
import triton.backends

from flashlatte import kv_cache

CALLS = dict.fromkeys(("sparse_decode", "sparse_prefill", "paged_index_select", "index_select"), 0)
# Prompts that end before a window is full, that decode across a group of 128, and that need four prefill chunks.
LENGTHS, NEW_TOKENS = (5, 122, 300), 8
# A prompt that shares its first page with the last of them, through the prefix cache.
AGAIN = 282
CHUNK, PAGE = 96, 256


def gather(out, cache, *, seq_lens, gather_lens, block_table, block_size, offset):
    """vLLM's kernel: the last ``gather_lens`` tokens of each request, all if None, as bf16 rows from ``offset`` on."""
    for request, length in enumerate(seq_lens.tolist()):
        first = 0 if gather_lens is None else length - int(gather_lens[request])
        if first == length:
            continue
        pages = cache[block_table[request, first // block_size : -(-length // block_size)].long()]
        rows = kv_cache.unpack(pages.unsqueeze(2), "model1").flatten(0, 2)
        begin = first % block_size
        out[request, offset : offset + length - first] = rows[begin : begin + length - first].bfloat16()


def _counting(name: str, operation: Any) -> Any:
    def counted(*arguments: Any, **options: Any) -> Any:
        CALLS[name] += 1
        # With the interpreter enabled, FlashLatte would choose its Triton kernels.
        return operation(*arguments, backend="reference", **options)

    return counted


def __getattr__(name: str) -> Any:
    """``DeepseekV4ForCausalLM``, which ``model_class_overrides`` names."""
    if name != "DeepseekV4ForCausalLM":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.models.deepseek_v4.common.ops import cache_utils
    from vllm.models.deepseek_v4.cpu import cpu_sparse, model
    from vllm.models.deepseek_v4.nvidia import flashmla
    from vllm.models.deepseek_v4.sparse_mla import DeepseekV4FlashMLABackend
    from vllm.v1.worker.utils import KVBlockZeroer
    from vllm.v1.worker.workspace import init_workspace_manager

    from flashlatte.integrations.vllm.backends import indexer, v4, v4_indexer

    v4.install()
    v4_indexer.install()
    for operation in CALLS:
        caller = v4 if hasattr(v4, operation) else indexer
        setattr(caller, operation, _counting(operation, getattr(caller, operation)))
    init_workspace_manager(torch.device("cpu"))
    # In the interpreter idle programs take as long as working ones.
    cache_utils.CombineTopkSwaIndicesKernel.NUM_WORKERS = 1
    flashmla.dequantize_and_gather_k_cache = gather
    KVBlockZeroer.zero_block_ids = lambda *_: None  # new pages are written before they are read

    class Layer(cpu_sparse.DeepseekV4CPUAttention):
        """Projections and cache writes are vLLM's for CPUs; attention is FlashLatte's, as on CUDA."""

        backend_cls = DeepseekV4FlashMLABackend
        swa_backend_cls = flashmla.DeepseekSparseSWAFlashMLABackend
        _forward_decode = v4.FlashLatteV4Attention._forward_decode
        _forward_prefill = v4.FlashLatteV4Attention._forward_prefill

        @classmethod
        def get_padded_num_q_heads(cls, num_heads: int) -> int:
            return v4.FlashLatteV4Attention.get_padded_num_q_heads(num_heads)

        def forward_mqa(self, q: torch.Tensor, kv: torch.Tensor, positions: torch.Tensor, output: torch.Tensor) -> None:
            heads = self.n_local_heads
            flashmla.DeepseekV4FlashMLAAttention.forward_mqa(self, q[:, :heads], kv, positions, output[:, :heads])

        def _o_proj(self, o: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return super()._o_proj(o.contiguous(), positions)

    model.DeepseekV4CPUAttention = Layer
    return model.DeepseekV4ForCausalLM


def serve(path: Path) -> dict[str, Any]:
    """vLLM's outputs: of prompts in chunks, then of a prompt whose first page is cached."""
    from support.vllm_engine import engine, prompts

    from flashlatte.integrations.vllm import support

    # FlashLatte's platform enables chunks and the prefix cache only for its own models.
    support.V4_MODELS = ()
    given = prompts(LENGTHS)
    with engine(
        path,
        dtype="bfloat16",
        kv_cache_memory_bytes=256 << 20,
        max_num_batched_tokens=CHUNK,
        block_size=PAGE,
        model_class_overrides={"DeepseekV4ForCausalLM": "support.vllm_v4_model:DeepseekV4ForCausalLM"},
    ) as vllm:
        generated = [*vllm.generate(given, NEW_TOKENS), *vllm.generate([given[-1][:AGAIN]], NEW_TOKENS)]
    from support import vllm_v4_model

    return {"generated": [dataclasses.asdict(one) for one in generated], "calls": vllm_v4_model.CALLS}


if __name__ == "__main__":
    # vLLM requires Triton for CPUs; the interpreter takes its place.
    never = types.SimpleNamespace(is_active=lambda: False)
    triton.backends.backends["cpu"] = types.SimpleNamespace(driver=never)
    Path(sys.argv[2]).write_text(json.dumps(serve(Path(sys.argv[1]))))
