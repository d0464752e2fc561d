"""Operations of a DeepSeek-V3 layer around its products and attention, and requests packed into rows and back."""

from __future__ import annotations

import torch

import flashlatte
from flashlatte import kv_cache
from flashlatte.bench.problems import (
    ConcatMlaQ,
    IndexWeights,
    LatentRows,
    MergeStates,
    PackSeq,
    RopeCacheWrite,
    RotateHeads,
    UnpackSeq,
)
from flashlatte.bench.workloads import draw
from flashlatte.bench.workloads.base import Outputs, Results, Workload, nan_like
from flashlatte.bench.workloads.tokens import (
    EQUAL,
    ONE_BYTE,
    ROPE,
    ROUNDED,
    Tokens,
    TokensWorkload,
    nbytes,
    positions,
    rotations,
)
from flashlatte.ops.index_weights import index_weights
from flashlatte.ops.norm_rope import latent_rows, rotate_heads
from flashlatte.ops.norm_rope.rotary import Rotary
from flashlatte.runtime import dispatch
from flashlatte.testing.compare import FLOAT32, Tolerance

BF16, LATENT, PAGE_SIZE, HEAD_DIM_V, HEAD_DIM = torch.bfloat16, 512, 64, 128, 576
# Sums of a few thousand products in float32, in another order.
SUMS = Tolerance(1e-4, 1e-4, 1e-8)


class LatentRowsWorkload(TokensWorkload):
    def __init__(self, problem: LatentRows, device: torch.device) -> None:
        rng, tokens = draw.generator(device), problem.tokens
        super().__init__(problem, device, BF16, tokens, head_dim=max(LATENT, problem.rank))
        self.kv_a = draw.normal((tokens, LATENT + ROPE), BF16, rng) * 10
        self.q_a = draw.normal((tokens, problem.rank), BF16, rng) * 10
        self.weight, self.q_weight = (
            (torch.rand(width, generator=rng, device=device) + 0.5).to(BF16) for width in (LATENT, problem.rank)
        )
        self.rotations, self.positions = rotations(rng), positions(tokens, rng)
        self.cache = kv_cache.allocate("bf16", -(-tokens // PAGE_SIZE), PAGE_SIZE, device=device)
        self.slots = torch.randperm(self.cache.shape[0] * PAGE_SIZE, generator=rng, device=device)[:tokens]
        self.bytes_moved = 3 * nbytes(self.kv_a) + 2 * nbytes(self.q_a)
        self.tolerances = {"rows": ROUNDED, "q": ROUNDED, "cached": ROUNDED}

    def compute(self, tokens: Tokens, backend: str, cache: torch.Tensor | None = None) -> Results:
        cache = self.cache if cache is None else cache
        rotary = Rotary(self.rotations, self.positions[tokens], interleaved=True)
        rows, q = latent_rows(
            self.kv_a[tokens],
            self.weight,
            rotary,
            1e-6,
            q_a=self.q_a[tokens],
            q_weight=self.q_weight,
            cache=cache,
            slot_mapping=self.slots[tokens],
            backend=backend,
        )
        assert q is not None
        return {"rows": rows, "q": q, "cache": cache}

    def poisoned_outputs(self) -> Outputs:
        self.cache.fill_(-7)
        return super().poisoned_outputs()

    def compared(self, results: Results) -> Results:
        some = {"rows": results["rows"][self.chosen], "q": results["q"][self.chosen]}
        return some | {"cached": results["cache"].flatten(0, 2)[self.slots[self.chosen]]}

    def reference(self) -> Results:
        results = self.compute(self.chosen, "reference", torch.zeros_like(self.cache))
        cached = results["cache"].flatten(0, 2)[self.slots[self.chosen]]
        return {"rows": results["rows"], "q": results["q"], "cached": cached}


class RotateHeadsWorkload(TokensWorkload):
    def __init__(self, problem: RotateHeads, device: torch.device) -> None:
        rng, shape = draw.generator(device), (problem.tokens, problem.heads, ROPE)
        super().__init__(problem, device, BF16, problem.tokens, head_dim=ROPE, h_q=problem.heads)
        self.x = draw.normal(shape, BF16, rng) * 10
        self.rotations, self.positions = rotations(rng), positions(problem.tokens, rng)
        self.bytes_moved = 2 * nbytes(self.x)
        self.tolerances = {"out": ROUNDED}

    def run(self, backend: str, outputs: Outputs | None = None) -> Results:
        return self._rotate(slice(None), backend, outputs["out"] if outputs else torch.empty_like(self.x))

    def poisoned_outputs(self) -> Outputs:
        return {"out": nan_like(self.x)}

    def compute(self, tokens: Tokens, backend: str) -> Results:
        return self._rotate(tokens, backend, torch.empty_like(self.x[tokens]))

    def _rotate(self, tokens: Tokens, backend: str, out: torch.Tensor) -> Results:
        rotary = Rotary(self.rotations, self.positions[tokens], interleaved=True)
        rotate_heads(self.x[tokens], rotary, out, backend=backend)
        return {"out": out}


class RopeCacheWriteWorkload(TokensWorkload):
    """The input of an in-place rotation is copied first, so that every call rotates the same; the copy is timed too."""

    def __init__(self, problem: RopeCacheWrite, device: torch.device) -> None:
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

    def compute(self, tokens: Tokens, backend: str, cache: torch.Tensor | None = None) -> Results:
        cache = self.cache if cache is None else cache
        k_rope, q_rope = self.k_rope[tokens].clone(), self.q_rope[tokens].clone()
        kv_cache.rope_write(
            cache,
            self.slots[tokens],
            self.latent[tokens],
            k_rope,
            self.positions[tokens],
            self.rotations,
            interleaved=True,
            q_rope=q_rope,
            cache_format=self.layout,
            backend=backend,
        )
        return {"k_rope": k_rope, "q_rope": q_rope, "cache": cache}

    def poisoned_outputs(self) -> Outputs:
        self.cache.fill_(-7 if self.cache.is_floating_point() else 0xFF)
        return super().poisoned_outputs()

    def compared(self, results: Results) -> Results:
        rotated = {name: results[name][self.chosen] for name in ("k_rope", "q_rope")}
        return rotated | {"keys": self._keys(results["cache"])}

    def reference(self) -> Results:
        results = self.compute(self.chosen, "reference", torch.zeros_like(self.cache))
        return {name: results[name] for name in ("k_rope", "q_rope")} | {"keys": self._keys(results["cache"])}

    def _keys(self, cache: torch.Tensor) -> torch.Tensor:
        return self.layout.decode(self.layout.page_views(cache), 1.0).flatten(0, 1)[self.slots[self.chosen]]


class ConcatMlaQWorkload(TokensWorkload):
    def __init__(self, problem: ConcatMlaQ, device: torch.device) -> None:
        rng, tokens, heads = draw.generator(device), problem.tokens, problem.heads
        super().__init__(problem, device, BF16, tokens, head_dim=LATENT + ROPE, h_q=heads)
        self.parts = [draw.normal((heads, tokens, width), BF16, rng).transpose(0, 1) for width in (LATENT, ROPE)]
        self.bytes_moved = 2 * nbytes(*self.parts)
        self.tolerances = {"out": EQUAL}

    def run(self, backend: str, outputs: Outputs | None = None) -> Results:
        return {"out": flashlatte.concat_mla_q(*self.parts, **(outputs or {}), backend=backend)}

    def poisoned_outputs(self) -> Outputs:
        shape = (*self.parts[0].shape[:2], LATENT + ROPE)
        return {"out": torch.full(shape, torch.nan, dtype=BF16, device=self.call.device)}

    def compute(self, tokens: Tokens, backend: str) -> Results:
        return {"out": flashlatte.concat_mla_q(*(part[tokens] for part in self.parts), backend=backend)}


class IndexWeightsWorkload(TokensWorkload):
    def __init__(self, problem: IndexWeights, device: torch.device) -> None:
        rng = draw.generator(device)
        super().__init__(problem, device, BF16, problem.tokens, head_dim=problem.hidden)
        self.hidden = draw.normal((problem.tokens, problem.hidden), BF16, rng) * 10
        self.weight = draw.normal((problem.heads, problem.hidden), torch.float32, rng) / 10
        self.flops = 2 * problem.tokens * problem.heads * problem.hidden
        self.bytes_moved = nbytes(self.hidden, self.weight) + 4 * problem.tokens * problem.heads
        self.tolerances = {"weights": SUMS}

    def compute(self, tokens: Tokens, backend: str) -> Results:
        return {"weights": index_weights(self.hidden[tokens], self.weight, backend=backend)}


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
