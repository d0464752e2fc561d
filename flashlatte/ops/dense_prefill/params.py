"""The arguments of an implementation, and their records for kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashlatte.runtime.kernel_records import ElementPointer, Int32


class DensePrefillParams(NamedTuple):
    """The checked arguments of ``api.dense_prefill``, except its outputs.

    ``window_left`` and ``window_right`` are ``ragged.UNLIMITED`` for unbounded; causal attention has right 0.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    softmax_scale: float
    window_left: int
    window_right: int
    empty_lse: float


class DensePrefillRequests(NamedTuple):
    """The queries and keys of each request: its first token, and the end of the last request, [count + 1].

    ``total_q`` and ``total_k``: rows of q and of k.
    """

    cu_seqlens_q: ElementPointer
    cu_seqlens_k: ElementPointer
    count: Int32
    total_q: Int32
    total_k: Int32


def requests_of(params: DensePrefillParams) -> DensePrefillRequests:
    """Make ``DensePrefillRequests`` from the arguments of a call."""
    count = params.cu_seqlens_q.shape[0] - 1
    return DensePrefillRequests(params.cu_seqlens_q, params.cu_seqlens_k, count, params.q.shape[0], params.k.shape[0])
