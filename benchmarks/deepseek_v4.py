"""Time DeepSeek-V4's operations: the compressor, what a layer does between its products, and between layers.

    PYTHONPATH=. python benchmarks/deepseek_v4.py [--section NAME] [--json benchmarks/results/deepseek_v4.jsonl]

8,192 tokens of prefill and decode steps of 128 requests, in CUDA graphs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import checked
import torch
from checked import Case

import flashlatte
from flashlatte import kv_cache
from flashlatte.bench.workloads import draw
from flashlatte.bench.workloads.base import Results, spread
from flashlatte.kv_cache.registry import as_format
from flashlatte.ops.mhc import mhc_post, mhc_pre
from flashlatte.testing.compare import Tolerance

ROPE, MAX_POSITION, PAGE_SIZE, HIDDEN = 64, 16384, 64, 4096
TOLERANCES: dict[str, Tolerance] = {
    "model1": checked.ONE_BYTE,
    "index_fp8": checked.ONE_BYTE,
    "index_mxfp4": checked.FOUR_BITS,
}
COMPARED_TOKENS = 64


def tokens_on(device: torch.device) -> int:
    return 8192 if device.type == "cuda" else 300


def table_of(rng: torch.Generator) -> torch.Tensor:
    """Cosines and sines [positions, 64]."""
    angles = torch.rand(MAX_POSITION, ROPE // 2, generator=rng, device=rng.device) * 6.283
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def compressor(device: torch.device) -> Iterator[list[Case]]:
    for cache_format, ratio in (("model1", 4), ("model1", 128), ("index_fp8", 4), ("index_mxfp4", 4)):
        tokens = tokens_on(device)
        for dtype in (torch.float32, torch.bfloat16):
            name = f"{cache_format}-r{ratio}-t{tokens}-{str(dtype).removeprefix('torch.')}"
            yield [compress_case(name, cache_format, ratio, [(0, tokens)], dtype, device)]
        # So that the groups of as many requests end as do in a step of any.
        steps = [(100 * ratio + i % ratio, 1) for i in range(128)]
        name = f"{cache_format}-r{ratio}-b128-decode"
        yield [compress_case(name, cache_format, ratio, steps, torch.float32, device)]


def compress_case(
    name: str, cache_format: str, ratio: int, spans: list[tuple[int, int]], dtype: torch.dtype, device: torch.device
) -> Case:
    """``spans``: of each request, the first token of the step and how many it has."""
    rng = draw.generator(device)
    overlaps = ratio == 4
    head_dim = 128 if cache_format.startswith("index") else 512
    width = head_dim * (1 + overlaps)
    ids = torch.cat([torch.full((count,), i) for i, (_, count) in enumerate(spans)]).to(device)
    positions = torch.cat([torch.arange(first, first + count) for first, count in spans]).to(device)
    pages_each = max(first + count for first, count in spans) // ratio // PAGE_SIZE + 1
    slots = ids * pages_each * PAGE_SIZE + positions // ratio
    # A ring of states, of as many tokens as a row is made of.
    state_page, columns = (PAGE_SIZE, ratio // PAGE_SIZE) if ratio > PAGE_SIZE else (4, 2 * ratio // 4)
    states = draw.normal((len(spans) * columns, state_page, 2 * width), torch.float32, rng) * 10
    kv, score = (draw.normal((len(ids), 2 * width), dtype, rng) * 10).split(width, dim=1)
    arguments = (
        kv,
        score,
        draw.normal((ratio, width), torch.float32, rng) * 10,
        torch.rand(head_dim, generator=rng, device=device) + 0.5,
        table_of(rng),
        ids,
        positions,
    )
    table = torch.arange(len(states), device=device).view(len(spans), columns)
    layout = as_format(cache_format, head_dim)
    cache = kv_cache.allocate(layout, len(spans) * pages_each, PAGE_SIZE, device=device)
    written = slots[positions % ratio == ratio - 1]

    def call(backend: str, cache: torch.Tensor = cache, states: torch.Tensor = states) -> Results:
        flashlatte.compress(
            *arguments, cache, slots, state_cache=states, state_table=table, cache_format=layout, backend=backend
        )
        return {"rows": cache}

    def read(results: Results) -> Results:
        rows = layout.decode(layout.page_views(results["rows"]), 1.0)
        return {"rows": rows.flatten(0, 1)[written]}

    record = layout.record_width * layout.record_dtype.itemsize
    members = ratio * (1 + overlaps) if len(spans) > 1 else 0  # read from the states, for each row
    moved = checked.nbytes(kv, score) + len(written) * (members * 2 * head_dim * 4 + record)
    if len(spans) > 1:
        moved += len(ids) * 2 * width * 4
    return Case(
        "compress",
        name,
        call,
        checked.against(
            lambda: read(call("reference", torch.zeros_like(cache), states.clone())),
            {"rows": TOLERANCES[cache_format]},
            read,
        ),
        moved,
        method="graph",
    )


def elementwise(device: torch.device) -> Iterator[list[Case]]:
    tokens, heads = tokens_on(device), 64 if device.type == "cuda" else 8
    rng = draw.generator(device)
    cos_sin = table_of(rng)
    positions = torch.randint(MAX_POSITION, (tokens,), generator=rng, device=device)
    chosen = spread(tokens, COMPARED_TOKENS, device)
    make: dict[str, Any] = {"tokens": tokens, "cos_sin": cos_sin, "positions": positions, "chosen": chosen, "rng": rng}
    yield [norm_case(**make)]
    yield [rotate_case(heads=heads, **make)]
    yield [inverse_case(heads=heads, **make)]
    yield [query_case(four_bits, heads=heads, **make) for four_bits in (False, True)]


def norm_case(tokens: int, chosen: torch.Tensor, rng: torch.Generator, **_: Any) -> Case:
    q, kv = (draw.normal((tokens, 1536), torch.bfloat16, rng) * 10).split((1024, 512), dim=1)
    q_weight, kv_weight = (torch.rand(rows.shape[1], generator=rng, device=rng.device) + 0.5 for rows in (q, kv))

    def call(backend: str, some: torch.Tensor | slice = slice(None)) -> Results:
        found = flashlatte.q_kv_norm(q[some], kv[some], q_weight, kv_weight, backend=backend)
        return dict(zip(("q", "kv"), found, strict=True))

    return Case(
        "q_kv_norm",
        f"t{tokens}-1024-512",
        call,
        by_token(call, chosen, dict.fromkeys(("q", "kv"), checked.ROUNDED)),
        2 * checked.nbytes(q, kv),
        method="graph",
    )


def rotate_case(
    tokens: int, heads: int, cos_sin: torch.Tensor, positions: torch.Tensor, chosen: torch.Tensor, rng: torch.Generator
) -> Case:
    q, kv = (draw.normal(shape, torch.bfloat16, rng) * 10 for shape in ((tokens, heads, 512), (tokens, 512)))
    out, slots = torch.empty_like(q), torch.arange(tokens, device=rng.device)
    layout = as_format("model1", 512)
    cache = kv_cache.allocate(layout, -(-tokens // PAGE_SIZE), PAGE_SIZE, device=rng.device)

    def call(backend: str) -> Results:
        flashlatte.rotate_and_cache(q, kv, cos_sin, positions, cache, slots, out=out, backend=backend)
        return {"q": out, "keys": cache}

    def reference() -> Results:
        fresh = torch.zeros_like(cache)
        rows = (q[chosen], kv[chosen], cos_sin, positions[chosen], fresh, slots[chosen])
        return {"q": flashlatte.rotate_and_cache(*rows, backend="reference"), "keys": keys_of(fresh)}

    def keys_of(rows: torch.Tensor) -> torch.Tensor:
        return layout.decode(layout.page_views(rows), 1.0).flatten(0, 1)[slots[chosen]]

    return Case(
        "rotate_and_cache",
        f"model1-t{tokens}-h{heads}",
        call,
        checked.against(
            reference,
            {"q": checked.ROUNDED, "keys": checked.ONE_BYTE},
            lambda results: {"q": results["q"][chosen], "keys": keys_of(results["keys"])},
        ),
        checked.nbytes(q, out, kv) + tokens * layout.record_width,
        method="graph",
    )


def inverse_case(
    tokens: int, heads: int, cos_sin: torch.Tensor, positions: torch.Tensor, chosen: torch.Tensor, rng: torch.Generator
) -> Case:
    outputs = draw.normal((tokens, heads, 512), torch.bfloat16, rng) * 10

    def call(backend: str, some: torch.Tensor | slice = slice(None)) -> Results:
        found = flashlatte.inverse_rope_quantize(outputs[some], cos_sin, positions[some], heads // 8, backend=backend)
        return dict(zip(("values", "scales"), found, strict=True))

    def read(results: Results) -> Results:
        blocks = results["values"].float().unflatten(-1, (-1, 128))
        return {"outputs": blocks * results["scales"].unsqueeze(-1)}

    return Case(
        "inverse_rope_quantize",
        f"t{tokens}-h{heads}",
        call,
        by_token(call, chosen, {"outputs": checked.ONE_BYTE}, read),
        checked.nbytes(outputs) * 3 // 2 + tokens * heads * 512 // 128 * 4,
        method="graph",
    )


def query_case(
    four_bits: bool,
    tokens: int,
    heads: int,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    chosen: torch.Tensor,
    rng: torch.Generator,
) -> Case:
    q = draw.normal((tokens, heads, 128), torch.bfloat16, rng) * 10
    weights = draw.normal((tokens, heads), torch.float32, rng)
    query: Any = flashlatte.index_query_mxfp4 if four_bits else flashlatte.index_query
    names = ("values", "scales", "weights") if four_bits else ("values", "weights")
    if not four_bits:
        query = partial(query, rope_first=False, interleaved=True, smallest_amax=1e-4, scale_rounding="power_of_two")

    def call(backend: str, some: torch.Tensor | slice = slice(None)) -> Results:
        return dict(zip(names, query(q[some], weights[some], cos_sin, positions[some], backend=backend), strict=True))

    def read(results: Results) -> Results:
        """Values, and weights with the queries' scales that are folded in."""
        if not four_bits:
            return {"queries": results["values"].float(), "weights": results["weights"]}
        values = results["values"]
        magnitudes = torch.tensor((0, 0.5, 1, 1.5, 2, 3, 4, 6), device=values.device)
        codes = torch.stack((values & 15, values >> 4), dim=-1).flatten(-2).long()
        numbers = magnitudes[codes % 8] * (1 - codes // 8 * 2)
        scales = torch.exp2(results["scales"].float() - 127)
        return {
            "queries": (numbers.unflatten(-1, (-1, 32)) * scales.unsqueeze(-1)).flatten(-2),
            "weights": results["weights"],
        }

    tolerance = checked.FOUR_BITS if four_bits else checked.ONE_BYTE
    row = 128 * 2 + 8 + (68 if four_bits else 128)
    return Case(
        "index_query_mxfp4" if four_bits else "index_query",
        f"t{tokens}-h{heads}",
        call,
        by_token(call, chosen, {"queries": tolerance, "weights": checked.ROUNDED}, read),
        tokens * heads * row,
        method="graph",
    )


def streams(device: torch.device) -> Iterator[list[Case]]:
    """Hyper-connections of a decode step and of a prefill."""
    for tokens in (64, tokens_on(device)):
        rng = draw.generator(device)
        rows = draw.normal((tokens, 4, HIDDEN), torch.bfloat16, rng) * 10
        numbers = draw.normal((tokens + 1, 24), torch.float32, rng) * 100
        given = rows, numbers[:tokens], numbers[tokens] / 100, torch.ones(3, device=device)
        chosen = spread(tokens, COMPARED_TOKENS, device)
        yield [pre_case(given, chosen)]
        yield [post_case(rows, mhc_pre(*given), chosen)]


def pre_case(given: tuple[torch.Tensor, ...], chosen: torch.Tensor) -> Case:
    rows, numbers, base, scale = given
    names = ("shares", "mixture", "seen")

    def call(backend: str, some: torch.Tensor | slice = slice(None)) -> Results:
        return dict(zip(names, mhc_pre(rows[some], numbers[some], base, scale, backend=backend), strict=True))

    moved = checked.nbytes(rows, numbers) + checked.nbytes(rows) // 4 + len(rows) * 20 * 4
    check = by_token(call, chosen, dict.fromkeys(names, checked.ROUNDED))
    return Case("mhc_pre", f"t{len(rows)}-{HIDDEN}", call, check, moved, method="graph")


def post_case(rows: torch.Tensor, made: tuple[torch.Tensor, ...], chosen: torch.Tensor) -> Case:
    shares, mixture, result = made

    def call(backend: str, some: torch.Tensor | slice = slice(None)) -> Results:
        return {"streams": mhc_post(result[some], rows[some], shares[some], mixture[some], backend=backend)}

    check = by_token(call, chosen, {"streams": checked.ROUNDED})
    moved = 2 * checked.nbytes(rows) + checked.nbytes(*made)
    return Case("mhc_post", f"t{len(rows)}-{HIDDEN}", call, check, moved, method="graph")


def by_token(
    call: Any, chosen: torch.Tensor, tolerances: dict[str, Tolerance], read: Any = lambda results: results
) -> Any:
    """A check of some tokens, each of which is computed by itself."""
    return checked.against(
        lambda: read(call("reference", chosen)),
        tolerances,
        lambda results: read({name: result[chosen] for name, result in results.items()}),
    )


SECTIONS: checked.Sections = {"compressor": compressor, "elementwise": elementwise, "streams": streams}

if __name__ == "__main__":
    sys.exit(checked.main(__doc__ or "", SECTIONS))
