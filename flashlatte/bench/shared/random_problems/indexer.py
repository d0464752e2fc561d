"""The indexer."""

from __future__ import annotations

from random import Random

from flashlatte.bench.problems import (
    IndexConvert,
    IndexerLoss,
    IndexGather,
    IndexLogits,
    IndexQuantize,
    IndexQuery,
    IndexSelect,
    IndexWeights,
    IndexWorkspace,
    PagedIndexLogits,
    PagedIndexSelect,
    SparseIndexLogits,
    TopK,
)
from flashlatte.bench.problems.indexer import ROW_VALUES
from flashlatte.bench.shared.random_problems.sizes import MOST_TOKENS, log_uniform

MOST_LOGITS, MOST_INDEX_KEYS = 2**24, 2**20


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


def sparse_index_logits(rng: Random) -> SparseIndexLogits:
    rows, block_size = log_uniform(rng, 1, 4096), rng.choice((8, 16))
    blocks = log_uniform(rng, 1, min(2048, MOST_LOGITS // rows // block_size))
    sizes = (rng.choice((16, 32, 64, 64, 128)), rng.choice((32, 64, 128)), rng.choice((64, 128)))
    keys = log_uniform(rng, block_size, MOST_INDEX_KEYS)
    return SparseIndexLogits(rows, keys, blocks, block_size, *sizes, rng.choice(("fp32", "bf16")))


def indexer_loss(rng: Random) -> IndexerLoss:
    # The reference computes all of the gradient of index_k.
    topk = rng.choice((0, 128, 512))
    s_kv, s_q = log_uniform(rng, max(topk, 256), 4096), log_uniform(rng, 16, 256)
    heads = rng.choice((16, 64, 128)), rng.choice((16, 32, 64))
    return IndexerLoss(*heads, topk, s_kv, min(s_q, s_kv), rng.choice((512, 576)), deterministic=rng.random() < 0.5)


def index_select(rng: Random) -> IndexSelect:
    return IndexSelect(index_logits(rng), rng.choice((512, 2048)), rng.choice((8, 512)))


def paged_index_select(rng: Random) -> PagedIndexSelect:
    return PagedIndexSelect(paged_index_logits(rng), rng.choice((512, 2048)))


def topk(rng: Random) -> TopK:
    rows = log_uniform(rng, 1, 4096)
    width = log_uniform(rng, 1, min(300_000, MOST_LOGITS // rows))
    return TopK(rows, width, rng.choice((512, 2048)), rng.choice(ROW_VALUES))


def index_quantize(rng: Random) -> IndexQuantize:
    return IndexQuantize(log_uniform(rng, 1, MOST_TOKENS), rng.choice(("index_fp8", "index_mxfp4")))


def index_gather(rng: Random) -> IndexGather:
    requests = log_uniform(rng, 1, 64)
    return IndexGather(requests, log_uniform(rng, 1, MOST_TOKENS // requests))


def index_convert(rng: Random) -> IndexConvert:
    batch, keys = log_uniform(rng, 1, 512), log_uniform(rng, 1, 32768)
    return IndexConvert(batch, keys, rng.choice((512, 2048)), compact=rng.random() < 0.5)


def index_query(rng: Random) -> IndexQuery:
    return IndexQuery(log_uniform(rng, 1, 4096), four_bits=rng.random() < 0.5)


def index_weights(rng: Random) -> IndexWeights:
    return IndexWeights(log_uniform(rng, 1, 128))


def index_workspace(rng: Random) -> IndexWorkspace:
    return IndexWorkspace(log_uniform(rng, 1, 8192))
