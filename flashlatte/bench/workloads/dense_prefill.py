"""Dense prefill: multi-head attention of requests with as many keys as queries, forward and backward."""

from __future__ import annotations

import functools
from typing import Any

import torch

from flashlatte.bench.problems import DensePrefill, DensePrefillBackward
from flashlatte.bench.workloads import draw
from flashlatte.bench.workloads.base import Outputs, Results, Rows, Workload, nan_like, spread
from flashlatte.ops.dense_prefill import dense_prefill
from flashlatte.runtime import dispatch
from flashlatte.testing import compare

HEAD_DIM_V = 128
HEADS_COMPARED = 2


class DensePrefillWorkload(Workload, problem=DensePrefill):
    def __init__(self, problem: DensePrefill, device: torch.device) -> None:
        rng = draw.generator(device)
        lengths = torch.full((problem.batch,), problem.tokens, dtype=torch.int32, device=device)
        if problem.varlen:
            lengths = draw.varying_lengths(problem.tokens, problem.batch, 1, rng)
        self.cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        self.longest = int(lengths.max())
        self.causal = problem.causal
        total, h_q, head_dim = int(lengths.sum()), problem.h_q, problem.head_dim
        self.q, self.k = (draw.normal((total, h_q, head_dim), torch.bfloat16, rng) for _ in range(2))
        self.v, self.dout = (draw.normal((total, h_q, HEAD_DIM_V), torch.bfloat16, rng) for _ in range(2))

        pairs = int(lengths.long().square().sum())
        self.flops = self._flops(head_dim) * h_q * pairs // (2 if problem.causal else 1)
        self.bytes_moved = self._passes * 2 * 2 * total * h_q * (head_dim + HEAD_DIM_V)
        self.heads_compared = spread(h_q, HEADS_COMPARED, device)
        self.tolerances = {"out": compare.DENSE_PREFILL_OUT, "lse": compare.DENSE_PREFILL_LSE}
        self.call = dispatch.CallSpec(
            problem.operation, device, self.q.dtype, head_dim=head_dim, head_dim_v=HEAD_DIM_V, h_q=h_q, h_kv=h_q
        )

    # Times that q, k, v and out, or as much, are read or written.
    _passes = 1
    _deterministic = False

    @staticmethod
    def _flops(head_dim: int) -> int:
        """For each query and key of a head."""
        return 2 * (head_dim + HEAD_DIM_V)

    def compute(self, rows: Rows, backend: str, **outputs: Any) -> Results:
        return self._prefill((self.q, self.k, self.v), backend, **outputs)

    def poisoned_outputs(self) -> Outputs:
        return {"out": nan_like(self.v)}

    def compared(self, results: Results) -> Results:
        return {name: result[:, self.heads_compared] for name, result in results.items()}

    def reference(self) -> Results:
        q, k, v = (x[:, self.heads_compared] for x in (self.q, self.k, self.v))
        return self._prefill((q, k, v), "reference")

    def _prefill(self, rows: tuple[torch.Tensor, ...], backend: str, **outputs: Any) -> Results:
        q, k, v = rows
        lengths = (self.cu_seqlens, self.cu_seqlens, self.longest, self.longest)
        options = {"causal": self.causal, "deterministic": self._deterministic, "backend": backend, **outputs}
        out, lse = dense_prefill(q, k, v, *lengths, **options)
        return {"out": out, "lse": lse}


class DensePrefillBackwardWorkload(DensePrefillWorkload, problem=DensePrefillBackward):
    """The gradients of q, k and v from that of out; the forward pass is run once and not timed."""

    _passes = 2
    # The backward pass runs on the stream of the forward pass.
    overlaps = captures = False

    def __init__(self, problem: DensePrefillBackward, device: torch.device) -> None:
        super().__init__(problem, device)
        self._deterministic = self.repeats = problem.deterministic
        self.tolerances = dict.fromkeys(("dq", "dk", "dv"), compare.DENSE_PREFILL_GRADIENT)
        self._recorded = functools.lru_cache(maxsize=1)(self._record)

    @staticmethod
    def _flops(head_dim: int) -> int:
        return 2 * (3 * head_dim + 2 * HEAD_DIM_V)

    def compute(self, rows: Rows, backend: str) -> Results:
        leaves, out = self._recorded(backend)
        return _gradients(out, leaves, self.dout)

    def poisoned_outputs(self) -> Outputs:
        return {}

    def reference(self) -> Results:
        rows = tuple(x[:, self.heads_compared].requires_grad_() for x in (self.q, self.k, self.v))
        out = self._prefill(rows, "reference")["out"]
        return _gradients(out, rows, self.dout[:, self.heads_compared])

    def _record(self, backend: str) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        rows = tuple(x.detach().requires_grad_() for x in (self.q, self.k, self.v))
        return rows, self._prefill(rows, backend)["out"]


def _gradients(out: torch.Tensor, rows: tuple[torch.Tensor, ...], dout: torch.Tensor) -> Results:
    return dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, rows, dout, retain_graph=True), strict=True))
