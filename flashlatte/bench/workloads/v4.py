"""Operations of a DeepSeek-V4 layer other than attention and matrix products."""

from __future__ import annotations

from typing import Any

import torch

import flashlatte
from flashlatte import kv_cache
from flashlatte.bench import problems
from flashlatte.bench.workloads import draw
from flashlatte.bench.workloads.base import ALL, FOUR_BITS, ONE_BYTE, ROUNDED, CacheWriter, Results, Rows, nbytes
from flashlatte.bench.workloads.tokens import TokensWorkload, positions, rotations
from flashlatte.kv_cache.registry import as_format
from flashlatte.ops.mhc import mhc_post, mhc_pre
from flashlatte.runtime import dispatch
from flashlatte.testing.compare import Tolerance

BF16, HEAD_DIM, INDEX_DIM, PAGE_SIZE, STREAMS = torch.bfloat16, 512, 128, 64, 4
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TOLERANCES: dict[str, Tolerance] = {"model1": ONE_BYTE, "index_fp8": ONE_BYTE, "index_mxfp4": FOUR_BITS}


class QKVNormWorkload(TokensWorkload, problem=problems.QKVNorm):
    def __init__(self, problem: problems.QKVNorm, device: torch.device) -> None:
        rng, widths = draw.generator(device), (problem.rank, problem.head_dim)
        super().__init__(problem, device, BF16, problem.tokens, head_dim=max(widths))
        self.q, self.kv = (draw.normal((problem.tokens, sum(widths)), BF16, rng) * 10).split(widths, dim=1)
        self.q_weight, self.kv_weight = (torch.rand(width, generator=rng, device=device) + 0.5 for width in widths)
        self.bytes_moved = 2 * nbytes(self.q, self.kv)
        self.tolerances = {"q": ROUNDED, "kv": ROUNDED}

    def compute(self, rows: Rows, backend: str) -> Results:
        q, kv = flashlatte.q_kv_norm(self.q[rows], self.kv[rows], self.q_weight, self.kv_weight, backend=backend)
        return {"q": q, "kv": kv}


class RotateAndCacheWorkload(CacheWriter, TokensWorkload, problem=problems.RotateAndCache):
    def __init__(self, problem: problems.RotateAndCache, device: torch.device) -> None:
        rng, tokens = draw.generator(device), problem.tokens
        super().__init__(problem, device, BF16, tokens, head_dim=HEAD_DIM, h_q=problem.heads)
        self.q, self.kv = (
            draw.normal(shape, BF16, rng) * 10 for shape in ((tokens, problem.heads, HEAD_DIM), (tokens, HEAD_DIM))
        )
        self.rotations, self.positions = rotations(rng), positions(tokens, rng)
        self.layout = as_format(problem.cache_format, HEAD_DIM)
        self.cache = kv_cache.allocate(self.layout, -(-tokens // PAGE_SIZE), PAGE_SIZE, device=device)
        self.slots = torch.arange(tokens, device=device)
        self.bytes_moved = 2 * nbytes(self.q) + nbytes(self.kv) + tokens * self.layout.bytes_per_token
        self.tolerances = {"q": ROUNDED, "keys": ONE_BYTE}

    def compute(self, rows: Rows, backend: str, cache: torch.Tensor | None = None) -> Results:
        cache = self.cache if cache is None else cache
        arguments = (self.q[rows], self.kv[rows], self.rotations, self.positions[rows], cache, self.slots[rows])
        q = flashlatte.rotate_and_cache(*arguments, cache_format=self.layout, backend=backend)
        return {"q": q, "cache": cache}


class InverseRopeQuantizeWorkload(TokensWorkload, problem=problems.InverseRopeQuantize):
    def __init__(self, problem: problems.InverseRopeQuantize, device: torch.device) -> None:
        rng, tokens, self.groups = draw.generator(device), problem.tokens, problem.heads // 8
        super().__init__(problem, device, BF16, tokens, head_dim=HEAD_DIM, h_q=problem.heads)
        self.o = draw.normal((tokens, problem.heads, HEAD_DIM), BF16, rng) * 10
        self.rotations, self.positions = rotations(rng), positions(tokens, rng)
        self.bytes_moved = nbytes(self.o) * 3 // 2 + self.o.numel() // 128 * 4
        self.tolerances = {"outputs": ONE_BYTE}

    def compute(self, rows: Rows, backend: str) -> Results:
        values, scales = flashlatte.inverse_rope_quantize(
            self.o[rows], self.rotations, self.positions[rows], self.groups, backend=backend
        )
        return {"values": values, "scales": scales}

    def read(self, results: Results) -> Results:
        blocks = results["values"].float().unflatten(-1, (-1, 128))
        return {"outputs": blocks * results["scales"].unsqueeze(-1)}


class IndexQueryWorkload(TokensWorkload, problem=problems.IndexQuery):
    def __init__(self, problem: problems.IndexQuery, device: torch.device) -> None:
        rng, shape = draw.generator(device), (problem.tokens, problem.heads)
        super().__init__(problem, device, BF16, problem.tokens, head_dim=INDEX_DIM, h_q=problem.heads)
        self.q = draw.normal((*shape, INDEX_DIM), BF16, rng) * 10
        self.weights = draw.normal(shape, torch.float32, rng)
        self.rotations, self.positions = rotations(rng), positions(problem.tokens, rng)
        self.four_bits = problem.four_bits
        self.bytes_moved = shape[0] * shape[1] * (INDEX_DIM * 2 + 8 + (68 if self.four_bits else 128))
        self.tolerances = {"queries": FOUR_BITS if self.four_bits else ONE_BYTE, "weights": ROUNDED}

    def compute(self, rows: Rows, backend: str) -> Results:
        arguments = (self.q[rows], self.weights[rows], self.rotations, self.positions[rows])
        if self.four_bits:
            values, scales, weights = flashlatte.index_query_mxfp4(*arguments, backend=backend)
            return {"values": values, "scales": scales, "weights": weights}
        of_v4: Any = {"rope_first": False, "interleaved": True, "smallest_amax": 1e-4}
        values, weights = flashlatte.index_query(*arguments, **of_v4, scale_rounding="power_of_two", backend=backend)
        return {"values": values, "weights": weights}

    def read(self, results: Results) -> Results:
        """Values, and weights with the queries' scales that are folded in."""
        if not self.four_bits:
            return {"queries": results["values"].float(), "weights": results["weights"]}
        values = results["values"]
        magnitudes = torch.tensor((0, 0.5, 1, 1.5, 2, 3, 4, 6), device=values.device)
        codes = torch.stack((values & 15, values >> 4), dim=-1).flatten(-2).long()
        values = magnitudes[codes % 8] * (1 - codes // 8 * 2)
        scales = torch.exp2(results["scales"].float() - 127)
        queries = (values.unflatten(-1, (-1, 32)) * scales.unsqueeze(-1)).flatten(-2)
        return {"queries": queries, "weights": results["weights"]}


class MhcPreWorkload(TokensWorkload, problem=problems.MhcPre):
    def __init__(self, problem: problems.MhcPre, device: torch.device) -> None:
        rng, tokens = draw.generator(device), problem.tokens
        super().__init__(problem, device, BF16, tokens, head_dim=STREAMS)
        self.streams = draw.normal((tokens, STREAMS, problem.hidden), BF16, rng) * 10
        values = draw.normal((tokens + 1, (2 + STREAMS) * STREAMS), torch.float32, rng) * 100
        self.projected, self.base = values[:tokens], values[tokens] / 100
        self.scale = torch.ones(3, device=device)
        self.bytes_moved = nbytes(self.streams) * 5 // 4 + nbytes(self.projected) + tokens * 20 * 4
        self.tolerances = dict.fromkeys(("shares", "mixture", "layer_input"), ROUNDED)

    def compute(self, rows: Rows, backend: str) -> Results:
        found = mhc_pre(self.streams[rows], self.projected[rows], self.base, self.scale, backend=backend)
        return dict(zip(("shares", "mixture", "layer_input"), found, strict=True))


class MhcPostWorkload(MhcPreWorkload, problem=problems.MhcPost):
    def __init__(self, problem: problems.MhcPost, device: torch.device) -> None:
        super().__init__(problem, device)
        made = super().compute(ALL, "reference")
        self.shares, self.mixture, self.result = made["shares"], made["mixture"], made["layer_input"]
        self.bytes_moved = 2 * nbytes(self.streams) + nbytes(*made.values())
        self.tolerances = {"streams": ROUNDED}

    def compute(self, rows: Rows, backend: str) -> Results:
        arguments = (x[rows] for x in (self.result, self.streams, self.shares, self.mixture))
        return {"streams": mhc_post(*arguments, backend=backend)}


class CompressWorkload(CacheWriter, problem=problems.Compress):
    # A call writes states, which others would read at the same time.
    overlaps = False

    def __init__(self, problem: problems.Compress, device: torch.device) -> None:
        rng, ratio, dtype = draw.generator(device), problem.ratio, DTYPES[problem.dtype]
        # First token and number of tokens of each request in the step. As many groups end in this step as on average.
        spans = [(0, problem.tokens)]
        if problem.requests:
            spans = [(100 * ratio + i % ratio, 1) for i in range(problem.requests)]
        overlaps = ratio == 4
        head_dim = 128 if problem.cache_format.startswith("index") else 512
        width = head_dim * (1 + overlaps)
        ids = torch.cat([torch.full((count,), i) for i, (_, count) in enumerate(spans)]).to(device)
        positions = torch.cat([torch.arange(first, first + count) for first, count in spans]).to(device)
        pages_each = max(first + count for first, count in spans) // ratio // PAGE_SIZE + 1
        self.row_slots = ids * pages_each * PAGE_SIZE + positions // ratio
        # A ring buffer of states, with the tokens of one row.
        state_page, columns = (PAGE_SIZE, ratio // PAGE_SIZE) if ratio > PAGE_SIZE else (4, 2 * ratio // 4)
        self.states = draw.normal((len(spans) * columns, state_page, 2 * width), torch.float32, rng) * 10
        kv, score = (draw.normal((len(ids), 2 * width), dtype, rng) * 10).split(width, dim=1)
        self.arguments = (
            kv,
            score,
            draw.normal((ratio, width), torch.float32, rng) * 10,
            torch.rand(head_dim, generator=rng, device=device) + 0.5,
            rotations(rng),
            ids,
            positions,
        )
        self.table = torch.arange(len(self.states), device=device).view(len(spans), columns)
        self.layout = as_format(problem.cache_format, head_dim)
        self.cache = kv_cache.allocate(self.layout, len(spans) * pages_each, PAGE_SIZE, device=device)
        self.slots = self.row_slots[positions % ratio == ratio - 1]  # those that are written

        members = ratio * (1 + overlaps) if problem.requests else 0  # read from the states, for each row
        record = self.layout.record_width * self.layout.record_dtype.itemsize
        self.bytes_moved = nbytes(kv, score) + len(self.slots) * (members * 2 * head_dim * 4 + record)
        if problem.requests:
            self.bytes_moved += len(ids) * 2 * width * 4
        self.tolerances = {"keys": TOLERANCES[problem.cache_format]}
        self.call = dispatch.CallSpec(problem.operation, device, dtype, self.layout.name, PAGE_SIZE, head_dim)

    def compute(self, rows: Rows, backend: str, cache: torch.Tensor | None = None) -> Results:
        cache, states = (self.cache, self.states) if cache is None else (cache, self.states.clone())
        options = {"state_cache": states, "state_table": self.table, "cache_format": self.layout}
        flashlatte.compress(*self.arguments, cache, self.row_slots, **options, backend=backend)
        return {"cache": cache}
