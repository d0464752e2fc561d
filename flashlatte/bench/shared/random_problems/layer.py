"""Operations of a layer other than attention and matrix products."""

from __future__ import annotations

from random import Random

from flashlatte.bench.problems import (
    Compress,
    ConcatMlaQ,
    InverseRopeQuantize,
    LatentRows,
    MergeStates,
    MhcPost,
    MhcPre,
    PackSeq,
    QKVNorm,
    RopeCacheWrite,
    RotateAndCache,
    RotateHeads,
    UnpackSeq,
)
from flashlatte.bench.shared.random_problems.sizes import log_uniform

MOST_TOKENS = 4096


def latent_rows(rng: Random) -> LatentRows:
    return LatentRows(log_uniform(rng, 1, 2 * MOST_TOKENS))


def rotate_heads(rng: Random) -> RotateHeads:
    return RotateHeads(log_uniform(rng, 1, MOST_TOKENS), rng.choice((16, 128)))


def rope_cache_write(rng: Random) -> RopeCacheWrite:
    return RopeCacheWrite(log_uniform(rng, 1, MOST_TOKENS), rng.choice((16, 128)))


def concat_mla_q(rng: Random) -> ConcatMlaQ:
    return ConcatMlaQ(log_uniform(rng, 1, MOST_TOKENS // 2), rng.choice((16, 128)))


def merge_states(rng: Random) -> MergeStates:
    return MergeStates(log_uniform(rng, 1, MOST_TOKENS), rng.choice((2, 3)))


def pack_seq(rng: Random) -> PackSeq:
    batch = log_uniform(rng, 1, 64)
    return PackSeq(batch, log_uniform(rng, 1, MOST_TOKENS // batch))


def unpack_seq(rng: Random) -> UnpackSeq:
    batch = log_uniform(rng, 1, 64)
    return UnpackSeq(batch, log_uniform(rng, 1, MOST_TOKENS // batch))


def compress(rng: Random) -> Compress:
    cache_format, ratio = rng.choice((("model1", 4), ("model1", 128), ("index_fp8", 4), ("index_mxfp4", 4)))
    if rng.random() < 0.5:
        return Compress(cache_format, ratio, requests=log_uniform(rng, 1, 128))
    return Compress(cache_format, ratio, tokens=log_uniform(rng, ratio, 1024))


def q_kv_norm(rng: Random) -> QKVNorm:
    return QKVNorm(log_uniform(rng, 1, 4 * MOST_TOKENS))


def rotate_and_cache(rng: Random) -> RotateAndCache:
    return RotateAndCache(log_uniform(rng, 1, MOST_TOKENS // 2))


def inverse_rope_quantize(rng: Random) -> InverseRopeQuantize:
    return InverseRopeQuantize(log_uniform(rng, 1, MOST_TOKENS // 2))


def mhc_pre(rng: Random) -> MhcPre:
    return MhcPre(log_uniform(rng, 1, MOST_TOKENS))


def mhc_post(rng: Random) -> MhcPost:
    return MhcPost(log_uniform(rng, 1, MOST_TOKENS))
