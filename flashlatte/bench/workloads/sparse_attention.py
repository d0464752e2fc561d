"""The backward pass of sparse attention: every query token selects random tokens of one contiguous latent."""

from __future__ import annotations

import functools

import torch

from flashlatte.bench.problems import SparseAttentionBackward
from flashlatte.bench.workloads import draw
from flashlatte.bench.workloads.base import Results, Rows, Workload
from flashlatte.ops.sparse_attention import sparse_attention
from flashlatte.runtime import dispatch
from flashlatte.testing import compare

HEAD_DIM_V = 512


class SparseAttentionBackwardWorkload(Workload, problem=SparseAttentionBackward):
    """The gradients of q, kv and attn_sink from that of out; the forward pass is run once and not timed.

    ``flops`` are 2 · h_q · (3 · d_qk + 2 · d_v) for each query token and key; ``bytes_moved`` q, out, each distinct key
    and their gradients once.
    """

    # The backward pass runs on the stream of the forward pass.
    overlaps = captures = False

    def __init__(self, problem: SparseAttentionBackward, device: torch.device) -> None:
        rng = draw.generator(device)
        s_q, h_q, head_dim, topk = problem.s_q, problem.h_q, problem.head_dim, problem.topk
        self.q = draw.normal((s_q, h_q, head_dim), torch.bfloat16, rng)
        self.kv = draw.normal((problem.s_kv, 1, head_dim), torch.bfloat16, rng)
        self.dout = draw.normal((s_q, h_q, HEAD_DIM_V), torch.bfloat16, rng)
        self.indices = draw.drifting(s_q, problem.s_kv, topk, problem.overlap, rng).int().unsqueeze(1)
        self.attn_sink = torch.randn(h_q, generator=rng, device=device)
        self._deterministic = self.repeats = problem.deterministic
        self._recorded = functools.lru_cache(maxsize=1)(self._record)

        self.flops = 2 * h_q * (3 * head_dim + 2 * HEAD_DIM_V) * s_q * topk
        distinct_keys = self.indices.unique().numel()
        self.bytes_moved = 2 * 2 * (s_q * h_q * (head_dim + HEAD_DIM_V) + distinct_keys * head_dim)
        self.tolerances = dict.fromkeys(("dq", "dkv", "d_sink"), compare.SPARSE_ATTENTION_GRADIENT)
        self.call = dispatch.CallSpec(
            problem.operation, device, self.q.dtype, head_dim=head_dim, head_dim_v=HEAD_DIM_V, h_q=h_q, h_kv=1
        )

    def compute(self, rows: Rows, backend: str) -> Results:
        leaves, out = self._recorded(backend)
        gradients = torch.autograd.grad(out, leaves, self.dout, retain_graph=True)
        return dict(zip(("dq", "dkv", "d_sink"), gradients, strict=True))

    def _record(self, backend: str) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        leaves = tuple(x.detach().requires_grad_() for x in (self.q, self.kv, self.attn_sink))
        q, kv, attn_sink = leaves
        out, _ = sparse_attention(
            q, kv, self.indices, attn_sink=attn_sink, deterministic=self._deterministic, backend=backend
        )
        return leaves, out
