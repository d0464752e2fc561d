"""Merges of attention's results, and requests into rows of equal length and back."""

from __future__ import annotations

import torch

import flashlatte
from flashlatte.bench.problems import MergeStates, PackSeq, UnpackSeq
from flashlatte.bench.workloads import draw
from flashlatte.bench.workloads.base import Outputs, Results, Workload, nan_like
from flashlatte.bench.workloads.tokens import EQUAL, ROUNDED, Tokens, TokensWorkload, nbytes
from flashlatte.runtime import dispatch
from flashlatte.testing.compare import FLOAT32

BF16, HEAD_DIM_V, HEAD_DIM = torch.bfloat16, 128, 576


class MergeStatesWorkload(TokensWorkload):
    def __init__(self, problem: MergeStates, device: torch.device) -> None:
        rng, shape = draw.generator(device), (problem.parts, problem.tokens, problem.heads)
        super().__init__(problem, device, BF16, problem.tokens, head_dim_v=HEAD_DIM_V)
        self.outs = draw.normal((*shape, HEAD_DIM_V), BF16, rng) * 10
        self.lses = draw.normal(shape, torch.float32, rng) * 10 + 5
        self.bytes_moved = nbytes(self.outs, self.lses) * (problem.parts + 1) // problem.parts
        self.tolerances = {"out": ROUNDED, "lse": FLOAT32}

    def run(self, backend: str, outputs: Outputs | None = None) -> Results:
        out, lse = flashlatte.merge_states(self.outs, self.lses, **(outputs or {}), backend=backend)
        return {"out": out, "lse": lse}

    def poisoned_outputs(self) -> Outputs:
        return {"out": nan_like(self.outs[0]), "lse": nan_like(self.lses[0])}

    def compute(self, tokens: Tokens, backend: str) -> Results:
        out, lse = flashlatte.merge_states(self.outs[:, tokens], self.lses[:, tokens], backend=backend)
        return {"out": out, "lse": lse}


class PackSeqWorkload(Workload):
    def __init__(self, problem: PackSeq, device: torch.device) -> None:
        rng, batch, self.longest = draw.generator(device), problem.batch, problem.tokens
        lengths = draw.integers(0, problem.tokens + 1, batch, rng)
        self.cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        self.total = int(lengths.sum())
        self.rows = draw.normal((self.total, problem.heads, HEAD_DIM), BF16, rng)
        self.packed_shape = (batch, problem.tokens, problem.heads, HEAD_DIM)
        self.bytes_moved = nbytes(self.rows) + 2 * batch * problem.tokens * problem.heads * HEAD_DIM
        self.tolerances = {"out": EQUAL}
        self.call = dispatch.CallSpec(problem.operation, device, BF16)

    def run(self, backend: str, outputs: Outputs | None = None) -> Results:
        options = {"pad_value": 0.0, "backend": backend, **(outputs or {})}
        return {"out": flashlatte.pack_seq(self.rows, self.cu_seqlens, self.longest, **options)}

    def poisoned_outputs(self) -> Outputs:
        return {"out": torch.full(self.packed_shape, torch.nan, dtype=BF16, device=self.call.device)}


class UnpackSeqWorkload(PackSeqWorkload):
    def __init__(self, problem: UnpackSeq, device: torch.device) -> None:
        super().__init__(problem, device)
        self.packed = super().run("reference")["out"]
        self.bytes_moved = 2 * nbytes(self.rows)

    def run(self, backend: str, outputs: Outputs | None = None) -> Results:
        options = {"backend": backend, **(outputs or {})}
        return {"out": flashlatte.unpack_seq(self.packed, self.cu_seqlens, self.total, **options)}

    def poisoned_outputs(self) -> Outputs:
        return {"out": nan_like(self.rows)}
