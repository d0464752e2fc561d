"""Tokens into caches and out of them."""

from __future__ import annotations

from random import Random

from flashlatte.bench.problems import (
    CacheCopy,
    CacheGather,
    CacheWrite,
    GatherRecords,
    ReshapeAndCache,
    TurboQuantDecode,
    TurboQuantGather,
    TurboQuantStore,
)
from flashlatte.bench.shared.random_problems.sizes import MOST_LATENTS, MOST_TOKENS, log_uniform
from flashlatte.kv_cache.turboquant import TURBOQUANT_NAMES

FORMATS = ("v32", "model1", "v41", "nvfp4_ds_mla", "bf16")


def cache_write(rng: Random) -> CacheWrite:
    return CacheWrite(rng.choice(FORMATS), log_uniform(rng, 1, MOST_TOKENS))


def cache_gather(rng: Random) -> CacheGather:
    requests = log_uniform(rng, 1, 64)
    return CacheGather(rng.choice(FORMATS), log_uniform(rng, requests, MOST_TOKENS), requests)


def turboquant_decode(rng: Random) -> TurboQuantDecode:
    batch = log_uniform(rng, 1, 128)
    return TurboQuantDecode(rng.choice(TURBOQUANT_NAMES), batch, log_uniform(rng, 1, MOST_LATENTS // batch))


def turboquant_store(rng: Random) -> TurboQuantStore:
    return TurboQuantStore(rng.choice(TURBOQUANT_NAMES), log_uniform(rng, 1, MOST_TOKENS))


def turboquant_gather(rng: Random) -> TurboQuantGather:
    return TurboQuantGather(rng.choice(TURBOQUANT_NAMES), log_uniform(rng, 1, MOST_TOKENS))


def gather_records(rng: Random) -> GatherRecords:
    requests = log_uniform(rng, 1, 64)
    return GatherRecords(rng.choice(FORMATS), log_uniform(rng, requests, MOST_TOKENS), requests)


def cache_copy(rng: Random) -> CacheCopy:
    return CacheCopy(log_uniform(rng, 1, 1024), rng.choice(("v32", "bf16")))


def reshape_and_cache(rng: Random) -> ReshapeAndCache:
    return ReshapeAndCache(log_uniform(rng, 1, MOST_TOKENS // 2), rng.choice(("bf16", "e4m3", "int8")))
