"""Decode and prefill."""

from __future__ import annotations

from random import Random

from flashlatte.bench.problems import (
    DenseDecode,
    DensePrefill,
    DensePrefillBackward,
    PagedAttention,
    SparseAttentionBackward,
    SparseDecode,
    SparsePrefill,
)
from flashlatte.bench.shared.random_problems.sizes import HEADS, MOST_LATENTS, log_uniform

MOST_QUERY_HEADS = 2**18
MOST_PAGED_KEYS = 2**16


def dense_decode(rng: Random) -> DenseDecode:
    batch, s_q = log_uniform(rng, 1, 200), rng.choice((1, 1, 2, 4))
    keys = log_uniform(rng, s_q, min(100_000, MOST_LATENTS // batch))
    cache_format, varlen = rng.choice((None, "fp8")), rng.random() < 0.5
    return DenseDecode(batch, s_q, rng.choice(HEADS), keys, varlen, causal=s_q > 1, cache_format=cache_format)


def sparse_decode(rng: Random) -> SparseDecode:
    topk = rng.choice((64, 128, 512, 2048))
    batch = log_uniform(rng, 1, min(200, MOST_LATENTS // topk))
    tokens = log_uniform(rng, topk, MOST_LATENTS // batch)
    shape = (batch, rng.choice((1, 2)), rng.choice(HEADS), topk, tokens, 64)
    cache_format = rng.choice(("v32", "model1", "bf16"))
    extra_topk = rng.choice((0, 64, 512)) if cache_format == "model1" else 0
    extra_tokens = log_uniform(rng, extra_topk, max(MOST_LATENTS // batch, extra_topk)) if extra_topk else 0
    varlen = extra_topk > 0 and rng.random() < 0.5
    return SparseDecode(cache_format, *shape, extra_topk=extra_topk, extra_tokens=extra_tokens, extra_varlen=varlen)


def sparse_prefill(rng: Random) -> SparsePrefill:
    topk = rng.choice((128, 512, 2048))
    return SparsePrefill(
        rng.choice((512, 576)), rng.choice(HEADS), topk, log_uniform(rng, topk, 32768), log_uniform(rng, 1, 1024)
    )


def sparse_attention_backward(rng: Random) -> SparseAttentionBackward:
    # The reference computes all of dkv.
    topk = rng.choice((128, 512))
    shape = (rng.choice((512, 576)), rng.choice(HEADS), topk, log_uniform(rng, topk, 8192), log_uniform(rng, 16, 256))
    return SparseAttentionBackward(*shape, deterministic=rng.random() < 0.5)


def dense_prefill(rng: Random) -> DensePrefill:
    return DensePrefill(*prefill_shape(rng), varlen=rng.random() < 0.5)


def dense_prefill_backward(rng: Random) -> DensePrefillBackward:
    # With a few tokens dq is a difference of nearly equal numbers, and bf16 leaves it a cosine difference of 7e-6.
    head_dim, batch, h_q, tokens, *rest = prefill_shape(rng)
    return DensePrefillBackward(
        head_dim, batch, h_q, max(tokens, 16), *rest, varlen=rng.random() < 0.5, deterministic=rng.random() < 0.5
    )


def prefill_shape(rng: Random) -> tuple[int, int, int, int, bool]:
    batch, heads = log_uniform(rng, 1, 16), rng.choice((2, 16, 128))
    tokens = log_uniform(rng, 1, MOST_QUERY_HEADS // batch // heads)
    return rng.choice((128, 192)), batch, heads, tokens, rng.random() < 0.5


def paged_attention(rng: Random) -> PagedAttention:
    batch = log_uniform(rng, 1, 128)
    keys = log_uniform(rng, 1, MOST_PAGED_KEYS // batch)
    queries = rng.choice((0, log_uniform(rng, 1, 1024)))
    return PagedAttention(batch, queries, keys, rng.choice(("bf16", "bf16", "e4m3")), rng.choice((16, 64)))
