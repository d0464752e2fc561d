"""Problems of random sizes, small and large: few kernel variants, many lengths.

Small sizes are as frequent as large ones. Sixteen processes share 80 GB, and each holds the results of a few calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

from flashlatte.bench import problems
from flashlatte.bench.problems import Problem
from flashlatte.bench.problems.indexer import ROW_VALUES
from flashlatte.kv_cache.turboquant import TURBOQUANT_NAMES

HEADS = (16, 64, 128)
FORMATS = ("v32", "model1", "v41", "nvfp4_ds_mla", "bf16")
MOST_LATENTS, MOST_TOKENS, MOST_LAYER_TOKENS = 2**17, 2**16, 2**12
MOST_QUERY_HEADS, MOST_PAGED_KEYS = 2**18, 2**16
MOST_LOGITS, MOST_INDEX_KEYS = 2**24, 2**20


def log_uniform(rng: Random, low: int, high: int) -> int:
    """An int from ``low`` to ``high``, as often between 1 and 10 as between 10 and 100."""
    return min(max(round(math.exp(rng.uniform(math.log(low), math.log(max(high, low))))), low), high)


def dense_decode(rng: Random) -> problems.DenseDecode:
    batch, s_q = log_uniform(rng, 1, 200), rng.choice((1, 1, 2, 4))
    keys = log_uniform(rng, s_q, min(100_000, MOST_LATENTS // batch))
    cache_format, varlen = rng.choice((None, "fp8")), rng.random() < 0.5
    heads = rng.choice(HEADS)
    return problems.DenseDecode(batch, s_q, heads, keys, varlen, causal=s_q > 1, cache_format=cache_format)


def sparse_decode(rng: Random) -> problems.SparseDecode:
    topk = rng.choice((64, 128, 512, 2048))
    batch = log_uniform(rng, 1, min(200, MOST_LATENTS // topk))
    tokens = log_uniform(rng, topk, MOST_LATENTS // batch)
    shape = (batch, rng.choice((1, 2)), rng.choice(HEADS), topk, tokens, 64)
    cache_format = rng.choice(("v32", "model1", "bf16"))
    extra_topk = rng.choice((0, 64, 512)) if cache_format == "model1" else 0
    extra_tokens = log_uniform(rng, extra_topk, max(MOST_LATENTS // batch, extra_topk)) if extra_topk else 0
    varlen = extra_topk > 0 and rng.random() < 0.5
    return problems.SparseDecode(
        cache_format, *shape, extra_topk=extra_topk, extra_tokens=extra_tokens, extra_varlen=varlen
    )


def sparse_prefill(rng: Random) -> problems.SparsePrefill:
    topk = rng.choice((128, 512, 2048))
    heads = (rng.choice((512, 576)), rng.choice(HEADS))
    return problems.SparsePrefill(*heads, topk, log_uniform(rng, topk, 32768), log_uniform(rng, 1, 1024))


def sparse_attention_backward(rng: Random) -> problems.SparseAttentionBackward:
    # The reference computes all of dkv.
    topk = rng.choice((128, 512))
    shape = (rng.choice((512, 576)), rng.choice(HEADS), topk, log_uniform(rng, topk, 8192), log_uniform(rng, 16, 256))
    return problems.SparseAttentionBackward(*shape, deterministic=rng.random() < 0.5)


def dense_prefill(rng: Random) -> problems.DensePrefill:
    return problems.DensePrefill(*prefill_shape(rng), varlen=rng.random() < 0.5)


def dense_prefill_backward(rng: Random) -> problems.DensePrefillBackward:
    # With a few tokens dq is a difference of nearly equal numbers, and bf16 leaves it a cosine difference of 7e-6.
    head_dim, batch, h_q, tokens, causal = prefill_shape(rng)
    flags = {"varlen": rng.random() < 0.5, "deterministic": rng.random() < 0.5}
    return problems.DensePrefillBackward(head_dim, batch, h_q, max(tokens, 16), causal, **flags)


def prefill_shape(rng: Random) -> tuple[int, int, int, int, bool]:
    batch, heads = log_uniform(rng, 1, 16), rng.choice((2, 16, 128))
    tokens = log_uniform(rng, 1, MOST_QUERY_HEADS // batch // heads)
    return rng.choice((128, 192)), batch, heads, tokens, rng.random() < 0.5


def paged_attention(rng: Random) -> problems.PagedAttention:
    batch = log_uniform(rng, 1, 128)
    keys = log_uniform(rng, 1, MOST_PAGED_KEYS // batch)
    queries = rng.choice((0, log_uniform(rng, 1, 1024)))
    return problems.PagedAttention(batch, queries, keys, rng.choice(("bf16", "bf16", "e4m3")), rng.choice((16, 64)))


def gathered(rng: Random) -> tuple[str, int, int]:
    """A format, and tokens of at least as many requests."""
    requests = log_uniform(rng, 1, 64)
    return rng.choice(FORMATS), log_uniform(rng, requests, MOST_TOKENS), requests


def turboquant_decode(rng: Random) -> problems.TurboQuantDecode:
    batch = log_uniform(rng, 1, 128)
    return problems.TurboQuantDecode(rng.choice(TURBOQUANT_NAMES), batch, log_uniform(rng, 1, MOST_LATENTS // batch))


def turboquant_tokens(rng: Random) -> tuple[str, int]:
    return rng.choice(TURBOQUANT_NAMES), log_uniform(rng, 1, MOST_TOKENS)


def index_logits(rng: Random) -> problems.IndexLogits:
    rows = log_uniform(rng, 1, 4096)
    keys = log_uniform(rng, 1, min(200_000, MOST_LOGITS // rows))
    head_dim = rng.choice((64, 128, 128))
    flags = {"ranges": rng.random() < 0.5, "clean": rng.random() < 0.5, "dtype": rng.choice(("fp32", "bf16"))}
    return problems.IndexLogits(rows, keys, rng.choice((16, 32, 64, 64, 128)), head_dim, **flags)


def paged_index_logits(rng: Random) -> problems.PagedIndexLogits:
    batch = log_uniform(rng, 1, 256)
    keys = log_uniform(rng, 2, min(400_000, MOST_INDEX_KEYS // batch))
    sizes = (rng.choice((1, 2)), rng.choice((16, 32, 64, 64, 128)), rng.choice((32, 64, 128)), rng.choice((64, 128)))
    flags = {"varlen": rng.random() < 0.5, "clean": rng.random() < 0.5, "dtype": rng.choice(("fp32", "bf16"))}
    return problems.PagedIndexLogits(batch, keys, *sizes, **flags)


def sparse_index_logits(rng: Random) -> problems.SparseIndexLogits:
    rows, block_size = log_uniform(rng, 1, 4096), rng.choice((8, 16))
    blocks = log_uniform(rng, 1, min(2048, MOST_LOGITS // rows // block_size))
    sizes = (rng.choice((16, 32, 64, 64, 128)), rng.choice((32, 64, 128)), rng.choice((64, 128)))
    keys = log_uniform(rng, block_size, MOST_INDEX_KEYS)
    return problems.SparseIndexLogits(rows, keys, blocks, block_size, *sizes, rng.choice(("fp32", "bf16")))


def indexer_loss(rng: Random) -> problems.IndexerLoss:
    # The reference computes all of the gradient of index_k.
    topk = rng.choice((0, 128, 512))
    s_kv, s_q = log_uniform(rng, max(topk, 256), 4096), log_uniform(rng, 16, 256)
    heads = rng.choice((16, 64, 128)), rng.choice((16, 32, 64))
    sizes = (topk, s_kv, min(s_q, s_kv), rng.choice((512, 576)))
    return problems.IndexerLoss(*heads, *sizes, deterministic=rng.random() < 0.5)


def topk(rng: Random) -> problems.TopK:
    rows = log_uniform(rng, 1, 4096)
    width = log_uniform(rng, 1, min(300_000, MOST_LOGITS // rows))
    return problems.TopK(rows, width, rng.choice((512, 2048)), rng.choice(ROW_VALUES), rng.choice((0, 64)))


def index_gather(rng: Random) -> problems.IndexGather:
    requests = log_uniform(rng, 1, 64)
    return problems.IndexGather(requests, log_uniform(rng, 1, MOST_TOKENS // requests))


def index_convert(rng: Random) -> problems.IndexConvert:
    batch, keys = log_uniform(rng, 1, 512), log_uniform(rng, 1, 32768)
    return problems.IndexConvert(batch, keys, rng.choice((512, 2048)), compact=rng.random() < 0.5)


def batch_and_tokens(rng: Random) -> tuple[int, int]:
    batch = log_uniform(rng, 1, 64)
    return batch, log_uniform(rng, 1, MOST_LAYER_TOKENS // batch)


def tokens_and_heads(rng: Random) -> tuple[int, int]:
    return log_uniform(rng, 1, MOST_LAYER_TOKENS), rng.choice((16, 128))


def compress(rng: Random) -> problems.Compress:
    cache_format, ratio = rng.choice((("model1", 4), ("model1", 128), ("index_fp8", 4), ("index_mxfp4", 4)))
    if rng.random() < 0.5:
        return problems.Compress(cache_format, ratio, requests=log_uniform(rng, 1, 128))
    return problems.Compress(cache_format, ratio, tokens=log_uniform(rng, ratio, 1024))


DRAWS: dict[str, Callable[[Random], Problem]] = {
    "dense_decode": dense_decode,
    "sparse_decode": sparse_decode,
    "sparse_prefill": sparse_prefill,
    "sparse_attention_backward": sparse_attention_backward,
    "dense_prefill": dense_prefill,
    "dense_prefill_backward": dense_prefill_backward,
    "paged_attention": paged_attention,
    "cache_write": lambda rng: problems.CacheWrite(rng.choice(FORMATS), log_uniform(rng, 1, MOST_TOKENS)),
    "cache_gather": lambda rng: problems.CacheGather(*gathered(rng)),
    "cache_copy": lambda rng: problems.CacheCopy(log_uniform(rng, 1, 1024), rng.choice(("v32", "bf16"))),
    "gather_records": lambda rng: problems.GatherRecords(*gathered(rng)),
    "reshape_and_cache": lambda rng: problems.ReshapeAndCache(
        log_uniform(rng, 1, MOST_TOKENS // 2), rng.choice(("bf16", "e4m3", "int8"))
    ),
    "turboquant_decode": turboquant_decode,
    "turboquant_store": lambda rng: problems.TurboQuantStore(*turboquant_tokens(rng)),
    "turboquant_gather": lambda rng: problems.TurboQuantGather(*turboquant_tokens(rng)),
    "index_logits": index_logits,
    "paged_index_logits": paged_index_logits,
    "sparse_index_logits": sparse_index_logits,
    "indexer_loss": indexer_loss,
    "index_select": lambda rng: problems.IndexSelect(index_logits(rng), rng.choice((512, 2048)), rng.choice((8, 512))),
    "paged_index_select": lambda rng: problems.PagedIndexSelect(paged_index_logits(rng), rng.choice((512, 2048))),
    "topk": topk,
    "index_quantize": lambda rng: problems.IndexQuantize(
        log_uniform(rng, 1, MOST_TOKENS), rng.choice(("index_fp8", "index_mxfp4"))
    ),
    "index_gather": index_gather,
    "index_convert": index_convert,
    "index_query": lambda rng: problems.IndexQuery(log_uniform(rng, 1, 4096), four_bits=rng.random() < 0.5),
    "index_weights": lambda rng: problems.IndexWeights(log_uniform(rng, 1, 128)),
    "index_workspace": lambda rng: problems.IndexWorkspace(log_uniform(rng, 1, 8192)),
    "latent_rows": lambda rng: problems.LatentRows(log_uniform(rng, 1, 2 * MOST_LAYER_TOKENS)),
    "rotate_heads": lambda rng: problems.RotateHeads(*tokens_and_heads(rng)),
    "rope_cache_write": lambda rng: problems.RopeCacheWrite(*tokens_and_heads(rng)),
    "concat_mla_q": lambda rng: problems.ConcatMlaQ(log_uniform(rng, 1, MOST_LAYER_TOKENS // 2), rng.choice((16, 128))),
    "merge_states": lambda rng: problems.MergeStates(log_uniform(rng, 1, MOST_LAYER_TOKENS), rng.choice((2, 3))),
    "pack_seq": lambda rng: problems.PackSeq(*batch_and_tokens(rng)),
    "unpack_seq": lambda rng: problems.UnpackSeq(*batch_and_tokens(rng)),
    "compress": compress,
    "q_kv_norm": lambda rng: problems.QKVNorm(log_uniform(rng, 1, 4 * MOST_LAYER_TOKENS)),
    "rotate_and_cache": lambda rng: problems.RotateAndCache(log_uniform(rng, 1, MOST_LAYER_TOKENS // 2)),
    "inverse_rope_quantize": lambda rng: problems.InverseRopeQuantize(log_uniform(rng, 1, MOST_LAYER_TOKENS // 2)),
    "mhc_pre": lambda rng: problems.MhcPre(log_uniform(rng, 1, MOST_LAYER_TOKENS)),
    "mhc_post": lambda rng: problems.MhcPost(log_uniform(rng, 1, MOST_LAYER_TOKENS)),
}
