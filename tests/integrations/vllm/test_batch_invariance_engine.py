"""Batch invariance of sparse models on a CPU: a request's log-probabilities have the same bits in any batch."""

from __future__ import annotations

import pytest
import torch
from support.vllm_engine import engine, prompts

from flashlatte.layers import absorbed

# The batch of a step, its chunks, and the contents of the prefix cache depend on the other prompts.
GIVEN = prompts((130, 97, 33, 1, 65, 200), shared=0)
NEW_TOKENS = 6


def by_row(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b with a separate product for each row, from memory of equal alignment."""
    columns = b.t().contiguous()
    return torch.stack([columns.mv(row.clone()) for row in a]) if len(a) else a.new_zeros(0, b.shape[1])


def by_matrix(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.stack([by_row(x, y) for x, y in zip(a, b, strict=True)])


def use_pytorch(layer: torch.nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


def prefill_kernel(*_, **__):
    raise AssertionError("a kernel for prefill was called")


@pytest.fixture
def batch_invariant(monkeypatch):
    """FlashLatte's part of VLLM_BATCH_INVARIANT, and a matrix product for each row.

    vLLM's own part, products whose bits do not depend on the number of rows, runs on GPUs only.
    """
    from vllm.model_executor.layers import utils

    from flashlatte.integrations.vllm.backends import common

    monkeypatch.setattr(common, "BATCH_INVARIANT", True)
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", use_pytorch)  # instead of oneDNN's
    library = torch.library.Library("aten", "IMPL")
    library.impl("mm", by_row, "CPU")
    library.impl("addmm", lambda bias, a, b, beta=1, alpha=1: bias * beta + by_row(a, b) * alpha, "CPU")
    library.impl("bmm", by_matrix, "CPU")
    library.impl("bmm.out", lambda a, b, *, out: out.copy_(by_matrix(a, b)), "CPU")
    yield
    library._destroy()


@pytest.mark.parametrize("family", ["v32", "glm"])
def test_a_request_has_the_same_bits_in_any_batch(checkpoint, batch_invariant, monkeypatch, family):
    from flashlatte.integrations.vllm.backends import indexer, sparse

    flags = []

    def attend_selected(query, cache, slots, scale, backend, invariant, *rest):
        flags.append(invariant)
        return absorbed.attend_selected(query, cache, slots, scale, backend, invariant, *rest)

    monkeypatch.setattr(sparse, "attend_selected", attend_selected)
    # Their kernels sum in another order than those of decode.
    monkeypatch.setattr(sparse, "attend_selected_rows", prefill_kernel)
    monkeypatch.setattr(indexer, "index_select", prefill_kernel)
    # Few tokens of many are selected, and MLPs are dense: vLLM's experts for CPUs multiply all tokens of an expert.
    model = checkpoint(family, first_k_dense_replace=9, index_topk=32)
    with engine(model, max_num_batched_tokens=96, block_size=16, enable_prefix_caching=False) as vllm:
        alone = [vllm.generate([ids], NEW_TOKENS)[0] for ids in GIVEN]
        together = vllm.generate(GIVEN, NEW_TOKENS)
    assert together == alone
    assert flags
    assert all(flags)
