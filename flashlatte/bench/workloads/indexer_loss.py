"""The indexer's loss with its gradients: random selections, or all keys up to a query's own."""

from __future__ import annotations

from typing import Any

import torch

from flashlatte.bench.problems import IndexerLoss
from flashlatte.bench.workloads import draw
from flashlatte.bench.workloads.base import Results, Rows, Workload
from flashlatte.ops.indexer_loss import indexer_loss
from flashlatte.ops.sparse_prefill import sparse_prefill
from flashlatte.runtime import dispatch
from flashlatte.testing import compare


class IndexerLossWorkload(Workload, problem=IndexerLoss):
    """The loss and the gradients of index_q, index_k and index_weights. lse is given for selections only.

    ``flops`` are 2 · (h_q · d + 3 · h_i · d_i) for each query token and key, and 2 · h_q · d more without lse;
    ``bytes_moved`` q and index_q, each distinct key and index key, and the gradients once.
    """

    # The backward pass runs on the stream of the forward pass.
    overlaps = captures = False

    def __init__(self, problem: IndexerLoss, device: torch.device) -> None:
        rng = draw.generator(device)
        s_q, s_kv, h_q, head_dim = problem.s_q, problem.s_kv, problem.h_q, problem.head_dim
        heads, index_dim = problem.heads, problem.index_dim
        # Scores of the attention and of the indexer have a standard deviation of 1.
        index_q, index_k, q, kv = (
            draw.normal(shape, torch.bfloat16, rng) / draw.STD
            for shape in ((s_q, heads, index_dim), (s_kv, index_dim), (s_q, h_q, head_dim), (s_kv, 1, head_dim))
        )
        weights = draw.normal((s_q, heads), torch.float32, rng)
        self._leaves = [leaf.requires_grad_() for leaf in (index_q, index_k, weights)]
        self._arguments: dict[str, Any] = {
            "index_q": index_q,
            "index_k": index_k,
            "index_weights": weights,
            "q": q,
            "kv": kv,
            "deterministic": problem.deterministic,
        }
        if problem.topk:
            indices = draw.distinct(s_q, s_kv, problem.topk, rng).int().unsqueeze(1)
            *_, lse = sparse_prefill(q, kv, indices)
            self._arguments |= {"indices": indices, "lse": lse}
            pairs, distinct_keys = s_q * problem.topk, indices.unique().numel()
        else:
            end = torch.arange(s_kv - s_q + 1, s_kv + 1, dtype=torch.int32, device=device)
            self._arguments |= {"key_start": torch.zeros_like(end), "key_end": end}
            pairs, distinct_keys = int(end.long().sum()), s_kv
        self.repeats = problem.deterministic or not problem.topk

        passes = 1 if problem.topk else 2
        self.flops = 2 * (passes * h_q * head_dim + 3 * heads * index_dim) * pairs
        of_indexer = s_q * heads * index_dim + distinct_keys * index_dim
        self.bytes_moved = 2 * (s_q * h_q * head_dim + distinct_keys * head_dim + 2 * of_indexer)
        gradients = ("d_index_q", "d_index_k", "d_index_weights")
        self.tolerances = {"loss": compare.INDEXER_LOSS, **dict.fromkeys(gradients, compare.INDEXER_LOSS_GRADIENT)}
        self.call = dispatch.CallSpec(
            problem.operation, device, q.dtype, head_dim=head_dim, index_dim=index_dim, h_q=h_q, h_kv=1
        )

    def compute(self, rows: Rows, backend: str) -> Results:
        loss, num_rows = indexer_loss(**self._arguments, backend=backend)
        loss = loss / num_rows
        return dict(zip(self.tolerances, (loss.detach(), *torch.autograd.grad(loss, self._leaves)), strict=True))
