"""One prompt's attention by each rank for its tokens."""

from __future__ import annotations

import functools
import warnings

import torch
import torch.distributed as dist

from flashlatte.distributed.prefill import PrefillRing
from flashlatte.runtime import gradients

HEADS, LATENT, QK, V = 3, 10, 12, 8
SCALE = 0.4


def draw(tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [tokens, h, qk], rows [tokens, latent] and the matrix that expands them."""
    generator = torch.Generator().manual_seed(tokens)
    shapes = (tokens, HEADS, QK), (tokens, LATENT), (LATENT, HEADS * (QK + V))
    q, rows, weight = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return q, rows, weight / LATENT**0.5


def expand(rows: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = (rows @ weight).unflatten(-1, (HEADS, QK + V)).split((QK, V), dim=-1)
    return keys, values


@functools.lru_cache
def ring() -> PrefillRing:
    return PrefillRing()


def attend(tokens: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    q, rows, weight = draw(tokens, dtype)
    mine, cache = ring().positions(tokens), torch.full((tokens, LATENT), torch.nan, dtype=dtype)
    most = 0

    def expand_here(held: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal most
        most = max(most, held.shape[0])
        return expand(held, weight)

    def store(held: torch.Tensor, positions: torch.Tensor) -> None:
        assert cache[positions].isnan().all(), "rows that came twice"
        cache[positions] = held

    out, lse = ring().attend(q[mine], rows[mine], expand_here, tokens=tokens, softmax_scale=SCALE, store=store)
    assert cache.equal(rows)
    assert most <= -(-tokens // ring().group.size()) + 1, "more than a shard was expanded at once"
    return {"positions": mine, "out": out, "lse": lse}


def attend_with_gradient() -> tuple[bool, str]:
    """Whether the output of queries and rows that require a gradient requires one, and the warning."""
    q, rows, weight = draw(9, torch.float32)
    mine = ring().positions(9)
    gradients._warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        out, _ = ring().attend(
            q[mine].requires_grad_(), rows[mine].requires_grad_(), functools.partial(expand, weight=weight), tokens=9
        )
    return out.requires_grad, str(caught[0].message)


def attend_with_another_scale() -> None:
    """Attention whose softmax scale differs by rank."""
    q, rows, weight = draw(9, torch.float32)
    mine = ring().positions(9)
    ring().attend(
        q[mine], rows[mine], functools.partial(expand, weight=weight), tokens=9, softmax_scale=0.5 + dist.get_rank()
    )
