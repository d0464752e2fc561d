"""MLA prefill in multi-head form, for vLLM's own attention backends and for context parallelism."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

from flashlatte.integrations.vllm import compat, support
from flashlatte.ops.dense_prefill import dense_prefill


class FlashLattePrefillBackend(MLAPrefillBackend):
    """``dense_prefill`` as ``--attention-config.mla_prefill_backend CUSTOM``."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16, torch.float32]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @classmethod
    def supports_compute_capability(cls, device_capability: Any) -> bool:
        return device_capability is None or tuple(device_capability) >= support.MIN_CAPABILITY

    def supports_out(self) -> bool:
        return True

    def run_prefill_new_tokens(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        return_softmax_lse: bool,
        out: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Causal attention among new tokens: [T, h, v], and with ``return_softmax_lse`` lse [h, T]."""
        if output_scale is not None:
            raise ValueError("output_scale must be None: FlashLatte's prefill writes no quantized outputs")
        metadata = self._prefill_metadata
        starts, longest = metadata.query_start_loc, metadata.max_query_len
        out, lse = dense_prefill(
            q, k, v, starts, starts, longest, longest, softmax_scale=self.scale, causal=True, out=out
        )
        return (out, lse.T) if return_softmax_lse else out

    def run_prefill_context_chunk(
        self,
        *,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        chunk: Any = None,
        chunk_idx: int | None = None,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of new tokens to a chunk of their context: [T, h, v] and lse [h, T]."""
        context = compat.context_chunk(self._prefill_metadata, chunk_idx if chunk is None else chunk, q.shape[0])
        out, lse = dense_prefill(
            q,
            k,
            v,
            context.cu_queries,
            context.cu_keys,
            context.max_queries,
            context.max_keys,
            softmax_scale=self.scale,
            out=out,
        )
        return out, lse.T
