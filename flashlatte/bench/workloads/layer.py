"""Operations of a DeepSeek-V3 layer around its products and attention, and requests packed into rows and back."""

from __future__ import annotations

from typing import Any

import torch

import flashlatte
from flashlatte import kv_cache
from flashlatte.bench import problems
from flashlatte.bench.workloads import draw
from flashlatte.bench.workloads.base import (
    ALL,
    EQUAL,
    ONE_BYTE,
    ROUNDED,
    CacheWriter,
    Outputs,
    Results,
    Rows,
    Workload,
    nan_like,
    nbytes,
)
from flashlatte.bench.workloads.tokens import ROPE, TokensWorkload, positions, rotations
from flashlatte.ops.index_weights import index_weights
from flashlatte.ops.norm_rope import Rotary, latent_rows, rotate_heads
from flashlatte.runtime import dispatch
from flashlatte.testing.compare import FLOAT32, Tolerance

BF16, LATENT, PAGE_SIZE, HEAD_DIM_V, HEAD_DIM = torch.bfloat16, 512, 64, 128, 576
# Sums of a few thousand products in float32, in another order.
SUMS = Tolerance(1e-4, 1e-4, 1e-8)


class LatentRowsWorkload(CacheWriter, TokensWorkload, problem=problems.LatentRows):
    def __init__(self, problem: problems.LatentRows, device: torch.device) -> None:
        rng, tokens = draw.generator(device), problem.tokens
        super().__init__(problem, device, BF16, tokens, head_dim=max(LATENT, problem.rank))
        self.kv_a = draw.normal((tokens, LATENT + ROPE), BF16, rng) * 10
        self.q_a = draw.normal((tokens, problem.rank), BF16, rng) * 10
        self.weight, self.q_weight = (
            (torch.rand(width, generator=rng, device=device) + 0.5).to(BF16) for width in (LATENT, problem.rank)
        )
        self.rotations, self.positions = rotations(rng), positions(tokens, rng)
        self.layout = kv_cache.get_format("bf16")
        self.cache = kv_cache.allocate(self.layout, -(-tokens // PAGE_SIZE), PAGE_SIZE, device=device)
        self.slots = torch.randperm(self.cache.shape[0] * PAGE_SIZE, generator=rng, device=device)[:tokens]
        self.bytes_moved = 3 * nbytes(self.kv_a) + 2 * nbytes(self.q_a)
        self.tolerances = {"rows": ROUNDED, "q": ROUNDED, "keys": ROUNDED}

    def compute(self, rows: Rows, backend: str, cache: torch.Tensor | None = None) -> Results:
        cache = self.cache if cache is None else cache
        rotary = Rotary(self.rotations, self.positions[rows], interleaved=True)
        options: dict[str, Any] = {"q_a": self.q_a[rows], "q_weight": self.q_weight, "backend": backend}
        options |= {"cache": cache, "slot_mapping": self.slots[rows]}
        latents, q = latent_rows(self.kv_a[rows], self.weight, rotary, 1e-6, **options)
        assert q is not None
        return {"rows": latents, "q": q, "cache": cache}


class RotateHeadsWorkload(TokensWorkload, problem=problems.RotateHeads):
    def __init__(self, problem: problems.RotateHeads, device: torch.device) -> None:
        rng, shape = draw.generator(device), (problem.tokens, problem.heads, ROPE)
        super().__init__(problem, device, BF16, problem.tokens, head_dim=ROPE, h_q=problem.heads)
        self.x = draw.normal(shape, BF16, rng) * 10
        self.rotations, self.positions = rotations(rng), positions(problem.tokens, rng)
        self.bytes_moved = 2 * nbytes(self.x)
        self.tolerances = {"out": ROUNDED}

    def poisoned_outputs(self) -> Outputs:
        return {"out": nan_like(self.x)}

    def compute(self, rows: Rows, backend: str, out: torch.Tensor | None = None) -> Results:
        x, rotary = self.x[rows], Rotary(self.rotations, self.positions[rows], interleaved=True)
        out = torch.empty_like(x) if out is None else out
        rotate_heads(x, rotary, out, backend=backend)
        return {"out": out}


class RopeCacheWriteWorkload(CacheWriter, TokensWorkload, problem=problems.RopeCacheWrite):
    """The input of an in-place rotation is copied first, so that every call rotates the same; the copy is timed too."""

    def __init__(self, problem: problems.RopeCacheWrite, device: torch.device) -> None:
        rng, tokens = draw.generator(device), problem.tokens
        facts = {"head_dim": LATENT + ROPE, "h_q": problem.heads, "page_size": PAGE_SIZE}
        super().__init__(problem, device, BF16, tokens, cache_format=problem.cache_format, **facts)
        self.latent = draw.normal((tokens, LATENT), BF16, rng)
        self.k_rope = draw.normal((tokens, ROPE), BF16, rng)
        self.q_rope = draw.normal((tokens, problem.heads, ROPE), BF16, rng)
        self.rotations, self.positions = rotations(rng), positions(tokens, rng)
        self.layout = kv_cache.get_format(problem.cache_format)
        self.cache = kv_cache.allocate(self.layout, -(-tokens // PAGE_SIZE), PAGE_SIZE, device=device)
        self.slots = torch.randperm(self.cache.shape[0] * PAGE_SIZE, generator=rng, device=device)[:tokens]
        self.bytes_moved = nbytes(self.latent) + 4 * nbytes(self.k_rope, self.q_rope)
        self.bytes_moved += tokens * self.layout.bytes_per_token
        self.tolerances = {"k_rope": ROUNDED, "q_rope": ROUNDED, "keys": ONE_BYTE}

    def compute(self, rows: Rows, backend: str, cache: torch.Tensor | None = None) -> Results:
        cache = self.cache if cache is None else cache
        k_rope, q_rope = self.k_rope[rows].clone(), self.q_rope[rows].clone()
        arguments = (cache, self.slots[rows], self.latent[rows], k_rope, self.positions[rows], self.rotations)
        options = {"interleaved": True, "q_rope": q_rope, "cache_format": self.layout, "backend": backend}
        kv_cache.rope_write(*arguments, **options)
        return {"k_rope": k_rope, "q_rope": q_rope, "cache": cache}


class ConcatMlaQWorkload(TokensWorkload, problem=problems.ConcatMlaQ):
    def __init__(self, problem: problems.ConcatMlaQ, device: torch.device) -> None:
        rng, tokens, heads = draw.generator(device), problem.tokens, problem.heads
        super().__init__(problem, device, BF16, tokens, head_dim=LATENT + ROPE, h_q=heads)
        self.parts = [draw.normal((heads, tokens, width), BF16, rng).transpose(0, 1) for width in (LATENT, ROPE)]
        self.bytes_moved = 2 * nbytes(*self.parts)
        self.tolerances = {"out": EQUAL}

    def compute(self, rows: Rows, backend: str, **outputs: Any) -> Results:
        return {"out": flashlatte.concat_mla_q(*(part[rows] for part in self.parts), **outputs, backend=backend)}

    def poisoned_outputs(self) -> Outputs:
        shape = (*self.parts[0].shape[:2], LATENT + ROPE)
        return {"out": torch.full(shape, torch.nan, dtype=BF16, device=self.call.device)}


class IndexWeightsWorkload(TokensWorkload, problem=problems.IndexWeights):
    def __init__(self, problem: problems.IndexWeights, device: torch.device) -> None:
        rng = draw.generator(device)
        super().__init__(problem, device, BF16, problem.tokens, head_dim=problem.hidden)
        self.hidden = draw.normal((problem.tokens, problem.hidden), BF16, rng) * 10
        self.weight = draw.normal((problem.heads, problem.hidden), torch.float32, rng) / 10
        self.flops = 2 * problem.tokens * problem.heads * problem.hidden
        self.bytes_moved = nbytes(self.hidden, self.weight) + 4 * problem.tokens * problem.heads
        self.tolerances = {"weights": SUMS}

    def compute(self, rows: Rows, backend: str) -> Results:
        return {"weights": index_weights(self.hidden[rows], self.weight, backend=backend)}


class MergeStatesWorkload(TokensWorkload, problem=problems.MergeStates):
    def __init__(self, problem: problems.MergeStates, device: torch.device) -> None:
        rng, shape = draw.generator(device), (problem.parts, problem.tokens, problem.heads)
        super().__init__(problem, device, BF16, problem.tokens, head_dim_v=HEAD_DIM_V)
        self.outs = draw.normal((*shape, HEAD_DIM_V), BF16, rng) * 10
        self.lses = draw.normal(shape, torch.float32, rng) * 10 + 5
        self.bytes_moved = nbytes(self.outs, self.lses) * (problem.parts + 1) // problem.parts
        self.tolerances = {"out": ROUNDED, "lse": FLOAT32}

    def compute(self, rows: Rows, backend: str, **outputs: Any) -> Results:
        out, lse = flashlatte.merge_states(self.outs[:, rows], self.lses[:, rows], **outputs, backend=backend)
        return {"out": out, "lse": lse}

    def poisoned_outputs(self) -> Outputs:
        return {"out": nan_like(self.outs[0]), "lse": nan_like(self.lses[0])}


class PackSeqWorkload(Workload, problem=problems.PackSeq):
    def __init__(self, problem: problems.PackSeq, device: torch.device) -> None:
        rng, batch, self.longest = draw.generator(device), problem.batch, problem.tokens
        lengths = draw.integers(0, problem.tokens + 1, batch, rng)
        self.cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        self.total = int(lengths.sum())
        self.rows = draw.normal((self.total, problem.heads, HEAD_DIM), BF16, rng)
        self.packed_shape = (batch, problem.tokens, problem.heads, HEAD_DIM)
        self.bytes_moved = nbytes(self.rows) + 2 * batch * problem.tokens * problem.heads * HEAD_DIM
        self.tolerances = {"out": EQUAL}
        self.call = dispatch.CallSpec(problem.operation, device, BF16)

    def compute(self, rows: Rows, backend: str, **outputs: Any) -> Results:
        options = {"pad_value": 0.0, "backend": backend, **outputs}
        return {"out": flashlatte.pack_seq(self.rows, self.cu_seqlens, self.longest, **options)}

    def poisoned_outputs(self) -> Outputs:
        return {"out": torch.full(self.packed_shape, torch.nan, dtype=BF16, device=self.call.device)}


class UnpackSeqWorkload(PackSeqWorkload, problem=problems.UnpackSeq):
    def __init__(self, problem: problems.UnpackSeq, device: torch.device) -> None:
        super().__init__(problem, device)
        self.packed = super().compute(ALL, "reference")["out"]
        self.bytes_moved = 2 * nbytes(self.rows)

    def compute(self, rows: Rows, backend: str, **outputs: Any) -> Results:
        return {"out": flashlatte.unpack_seq(self.packed, self.cu_seqlens, self.total, **outputs, backend=backend)}

    def poisoned_outputs(self) -> Outputs:
        return {"out": nan_like(self.rows)}
