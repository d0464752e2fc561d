"""Time paged attention of grouped queries: decode beside its one-byte caches, prefill, and batches of both, in turns.

PYTHONPATH=. python benchmarks/paged_attention.py [--section NAME] [--json benchmarks/results/paged_attention.jsonl]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import checked
import torch

from flashlatte.bench.workloads import draw
from flashlatte.bench.workloads.base import Results
from flashlatte.ops.paged_attention import paged_attention

H_Q, H_KV, D = 32, 8, 128
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def case(
    name: str,
    queries: list[int],
    keys: list[int],
    page_size: int,
    device: torch.device,
    cache_dtype: torch.dtype = BF16,
    **options: Any,
) -> checked.Case:
    """Requests of so many queries and keys, causal, their pages in random order."""
    rng = draw.generator(device)
    pages = -(-max(keys) // page_size)
    shape = (len(keys) * pages, page_size, H_KV, D)
    scale = None if cache_dtype == BF16 else 1 / 64
    k_cache, v_cache = ((draw.normal(shape, BF16, rng) / (scale or 1.0)).to(cache_dtype) for _ in range(2))
    arguments: dict[str, Any] = {
        "q": draw.normal((sum(queries), H_Q, D), BF16, rng) * 10,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_table": draw.block_table(len(keys), pages, rng),
        "seqused_k": torch.tensor(keys, dtype=torch.int32, device=device),
        "cu_seqlens_q": torch.tensor([0, *queries], device=device).cumsum(0).int(),
        "causal": True,
        "k_scale": scale,
        "v_scale": scale,
    }

    def run(backend: str) -> Results:
        return dict(zip(("out", "lse"), paged_attention(**arguments, backend=backend), strict=True))

    pairs = sum(s * k - s * (s - 1) // 2 for s, k in zip(queries, keys, strict=True))
    return checked.Case(
        "paged_attention",
        f"{name}-p{page_size}",
        run,
        checked.against(lambda: run("reference"), {"out": checked.ROUNDED, "lse": checked.ROUNDED}),
        2 * checked.nbytes(arguments["q"]) + 2 * sum(keys) * H_KV * D * k_cache.element_size(),
        flops=4 * H_Q * D * pairs if max(queries) > 1 else None,
        **options,
    )


def decode(device: torch.device) -> Iterator[list[checked.Case]]:
    is_gpu = device.type == "cuda"
    for page_size in (64, 16):
        batch, keys = (128, 4096) if is_gpu else (2, 40)
        kinds = (("bf16", BF16), ("e4m3", E4M3), ("e5m2", torch.float8_e5m2), ("int8", torch.int8))
        yield [
            case(f"decode-{name}-b{batch}-k{keys}", [1] * batch, [keys] * batch, page_size, device, dtype)
            for name, dtype in kinds
        ]
    keys = 131_072 if is_gpu else 90
    yield [case(f"decode-bf16-b1-k{keys}", [1], [keys], 64, device)]


def prefill(device: torch.device) -> Iterator[list[checked.Case]]:
    tokens = 8192 if device.type == "cuda" else 20
    for page_size in (64, 16, 128):
        yield [
            case(f"prefill-s{tokens}", [tokens], [tokens], page_size, device, backend=backend)
            for backend in ("hopper", "portable")
        ]


def mixed(device: torch.device) -> Iterator[list[checked.Case]]:
    """64 decodes and a chunk of 2,048 queries, of 8,192 keys each: together, and each alone."""
    batch, chunk, keys = (64, 2048, 8192) if device.type == "cuda" else (2, 9, 20)
    for page_size in (64, 16):
        yield [
            case(
                f"mixed-b{batch}-s{chunk}",
                [1] * batch + [chunk],
                [keys] * (batch + 1),
                page_size,
                device,
                backend="hopper",
            ),
            case(f"decodes-b{batch}", [1] * batch, [keys] * batch, page_size, device),
            case(f"chunk-s{chunk}", [chunk], [keys], page_size, device, backend="hopper"),
        ]


SECTIONS: checked.Sections = {"decode": decode, "prefill": prefill, "mixed": mixed}

if __name__ == "__main__":
    sys.exit(checked.main(__doc__ or "", SECTIONS))
