"""Problems of random sizes, small and large: few kernel variants, many lengths."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

from flashlatte.bench.problems import (
    CacheGather,
    CacheWrite,
    DenseDecode,
    DensePrefill,
    DensePrefillBackward,
    IndexLogits,
    IndexSelect,
    PagedIndexLogits,
    PagedIndexSelect,
    Problem,
    SparseDecode,
    SparsePrefill,
    TopK,
    TurboQuantDecode,
    TurboQuantStore,
)
from flashlatte.kv_cache.turboquant import TURBOQUANT_NAMES

# Sixteen processes share 80 GB, and each holds the results of a few calls.
MOST_LOGITS = 2**24
MOST_INDEX_KEYS, MOST_LATENTS = 2**20, 2**17
MOST_QUERY_HEADS = 2**18
HEADS = (16, 64, 128)
FORMATS = ("v32", "model1", "v41", "nvfp4_ds_mla", "bf16")


def dense_decode(rng: Random) -> DenseDecode:
    batch, s_q = log_uniform(rng, 1, 200), rng.choice((1, 1, 2, 4))
    keys = log_uniform(rng, s_q, min(100_000, MOST_LATENTS // batch))
    flags = {"varlen": rng.random() < 0.5, "causal": s_q > 1}
    return DenseDecode(batch, s_q, rng.choice(HEADS), keys, cache_format=rng.choice((None, "fp8")), **flags)


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


def dense_prefill(rng: Random) -> DensePrefill:
    return DensePrefill(*prefill_shape(rng), varlen=rng.random() < 0.5)


def dense_prefill_backward(rng: Random) -> DensePrefillBackward:
    return DensePrefillBackward(*prefill_shape(rng), varlen=rng.random() < 0.5, deterministic=rng.random() < 0.5)


def prefill_shape(rng: Random) -> tuple[int, int, int, int, bool]:
    batch, heads = log_uniform(rng, 1, 16), rng.choice((2, 16, 128))
    tokens = log_uniform(rng, 1, MOST_QUERY_HEADS // batch // heads)
    return rng.choice((128, 192)), batch, heads, tokens, rng.random() < 0.5


def cache_write(rng: Random) -> CacheWrite:
    return CacheWrite(rng.choice(FORMATS), log_uniform(rng, 1, MOST_LATENTS // 2))


def cache_gather(rng: Random) -> CacheGather:
    requests = log_uniform(rng, 1, 64)
    return CacheGather(rng.choice(FORMATS), log_uniform(rng, requests, MOST_LATENTS // 2), requests)


def turboquant_decode(rng: Random) -> TurboQuantDecode:
    batch = log_uniform(rng, 1, 128)
    return TurboQuantDecode(rng.choice(TURBOQUANT_NAMES), batch, log_uniform(rng, 1, MOST_LATENTS // batch))


def turboquant_store(rng: Random) -> TurboQuantStore:
    return TurboQuantStore(rng.choice(TURBOQUANT_NAMES), log_uniform(rng, 1, MOST_LATENTS // 2))


def index_logits(rng: Random) -> IndexLogits:
    rows = log_uniform(rng, 1, 4096)
    keys = log_uniform(rng, 1, min(200_000, MOST_LOGITS // rows))
    head_dim = rng.choice((64, 128, 128))
    flags = {"ranges": rng.random() < 0.5, "clean": rng.random() < 0.5, "dtype": rng.choice(("fp32", "bf16"))}
    return IndexLogits(rows, keys, rng.choice((16, 32, 64, 64, 128)), head_dim, **flags)


def paged_index_logits(rng: Random) -> PagedIndexLogits:
    batch = log_uniform(rng, 1, 256)
    keys = log_uniform(rng, 2, min(400_000, MOST_INDEX_KEYS // batch))
    sizes = (rng.choice((1, 2)), rng.choice((16, 32, 64, 64, 128)), rng.choice((32, 64, 128)), rng.choice((64, 128)))
    flags = {"varlen": rng.random() < 0.5, "clean": rng.random() < 0.5, "dtype": rng.choice(("fp32", "bf16"))}
    return PagedIndexLogits(batch, keys, *sizes, **flags)


def index_select(rng: Random) -> IndexSelect:
    return IndexSelect(index_logits(rng), rng.choice((512, 2048)), rng.choice((8, 512)))


def paged_index_select(rng: Random) -> PagedIndexSelect:
    return PagedIndexSelect(paged_index_logits(rng), rng.choice((512, 2048)))


def topk(rng: Random) -> TopK:
    rows = log_uniform(rng, 1, 4096)
    return TopK(rows, log_uniform(rng, 1, min(300_000, MOST_LOGITS // rows)), rng.choice((512, 2048)))


DRAWS: dict[str, Callable[[Random], Problem]] = {
    "dense_decode": dense_decode,
    "sparse_decode": sparse_decode,
    "sparse_prefill": sparse_prefill,
    "dense_prefill": dense_prefill,
    "dense_prefill_backward": dense_prefill_backward,
    "cache_write": cache_write,
    "cache_gather": cache_gather,
    "turboquant_decode": turboquant_decode,
    "turboquant_store": turboquant_store,
    "index_logits": index_logits,
    "paged_index_logits": paged_index_logits,
    "index_select": index_select,
    "paged_index_select": paged_index_select,
    "topk": topk,
}


def log_uniform(rng: Random, low: int, high: int) -> int:
    """An int from ``low`` to ``high``, as often between 1 and 10 as between 10 and 100."""
    return min(max(round(math.exp(rng.uniform(math.log(low), math.log(max(high, low))))), low), high)
