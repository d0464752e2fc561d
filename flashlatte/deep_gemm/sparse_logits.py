"""Logits over candidate blocks of keys (DeepSeek-V4.1's two-level indexer), and the metadata of the blocks."""

from __future__ import annotations

import torch

from flashlatte.deep_gemm.operands import (
    IndexQuery,
    check_pair,
    float32_weights,
    keys,
    logits_dtype_of,
    query,
    refuse_paged_mxfp8,
)
from flashlatte.ops.index_logits import sparse_index_logits
from flashlatte.runtime import checks
from flashlatte.runtime.block_tables import whole_rows


def fp8_fp4_sparse_mqa_logits(
    q: IndexQuery,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    metadata: torch.Tensor,
    num_max_sparse_blocks: int,
    sparse_block_kv: int,
    use_unaligned_ks: bool = False,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """Logits of queries against candidate blocks of contiguous index keys (DeepSeek-V4.1's two-level indexer).

    Args:
        q, kv, weights, backend: as for ``fp8_fp4_mqa_logits``.
        metadata: the result of ``get_sparse_mqa_logits_metadata`` for the same queries.
        num_max_sparse_blocks: number of candidate blocks of a query.
        sparse_block_kv: keys of a block.
        use_unaligned_ks: unused; ``metadata`` includes it.

    Returns:
        [M, num_max_sparse_blocks · sparse_block_kv] in the dtype of ``weights``: column j · sparse_block_kv + o is key
        o of candidate block j, -inf if that key is outside the query's range.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device; inconsistent arguments.
    """
    checks.flag("use_unaligned_ks", use_unaligned_ks)
    check_pair("kv", kv)
    k, k_scale = keys(*kv)
    with checks.naming(k="kv[0]", k_scale="kv[1]"):
        return _sparse_logits(query(q), k, k_scale, weights, metadata, num_max_sparse_blocks, sparse_block_kv, backend)


def fp8_fp4_paged_sparse_mqa_logits(
    q: IndexQuery,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    metadata: torch.Tensor,
    num_max_sparse_blocks: int,
    sparse_block_kv: int,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """Logits of queries against candidate blocks of a paged cache of index keys.

    Args:
        q, kv_cache, weights, backend: as for ``fp8_fp4_paged_mqa_logits``, with next_n 1.
        metadata: the result of ``get_paged_sparse_mqa_logits_metadata`` for the same queries and cache.
        num_max_sparse_blocks: candidate blocks of a query.
        sparse_block_kv: keys of a block; divides the page size.

    Returns:
        [b, num_max_sparse_blocks · sparse_block_kv], as ``fp8_fp4_sparse_mqa_logits``.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device; inconsistent arguments.
    """
    refuse_paged_mxfp8(q)
    values = query(q)
    if values.dim() != 4 or values.shape[1] != 1:
        raise ValueError(f"q must have shape [rows, 1, H, D] for candidate blocks, got {list(values.shape)}")
    cache = checks.given("kv_cache", kv_cache)
    if cache.dim() in (3, 4):
        _check_block_size(sparse_block_kv, cache.shape[1], "the page size")
    with checks.naming(k="kv_cache"):
        return _sparse_logits(
            values.squeeze(1),
            cache.unsqueeze(2) if cache.dim() == 3 else cache,
            None,
            weights,
            metadata,
            num_max_sparse_blocks,
            sparse_block_kv,
            backend,
        )


def get_sparse_mqa_logits_metadata(
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    num_kv_tokens: int,
    sparse_kv_block_indices: torch.Tensor,
    qk_dtype: torch.dtype,
    sparse_block_kv: int,
    use_unaligned_ks: bool = False,
) -> torch.Tensor:
    """The first key and the number of visible keys of each candidate block, for ``fp8_fp4_sparse_mqa_logits``.

    Args:
        cu_seq_len_k_start, cu_seq_len_k_end: int32 [M], the range of keys of each query.
        num_kv_tokens: keys in total.
        sparse_kv_block_indices: int32 [M, num_max_sparse_blocks]. Block i covers ``sparse_block_kv`` keys from
            i · sparse_block_kv, or from i · sparse_block_kv + cu_seq_len_k_start % sparse_block_kv with
            ``use_unaligned_ks``. A block that begins outside the query's range has no keys; repeats are allowed.
        qk_dtype: unused.
        sparse_block_kv: keys of a block.
        use_unaligned_ks: whether ranges may begin anywhere; if False, they begin at multiples of ``sparse_block_kv``.

    Returns:
        int64 [M, num_max_sparse_blocks, 2], on the device of the arguments.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device.
    """
    blocks = checks.tensor(
        "sparse_kv_block_indices", sparse_kv_block_indices, ("M", "num_max_sparse_blocks"), checks.INDEX_DTYPES
    )
    limits = []
    for name, value in (("cu_seq_len_k_start", cu_seq_len_k_start), ("cu_seq_len_k_end", cu_seq_len_k_end)):
        checks.indices(name, value, blocks.shape[:1], blocks.device)
        limits.append(value.long().unsqueeze(1))
    start, end = limits
    size = checks.positive_int("sparse_block_kv", sparse_block_kv)
    num_kv_tokens = checks.positive_int("num_kv_tokens", num_kv_tokens)
    # Clamped without overflow: blocks after the last key stay after it.
    first = blocks.long().clamp(-1, num_kv_tokens) * size
    if checks.flag("use_unaligned_ks", use_unaligned_ks):
        first += start % size
    num_keys = (end.clamp(0, num_kv_tokens) - first).clamp(0, size)
    return torch.stack((first, num_keys.where(first >= start.clamp(min=0), 0)), dim=-1)


def get_paged_sparse_mqa_logits_metadata(
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    indices: torch.Tensor | None,
    page_kv: int,
    sparse_kv_block_indices: torch.Tensor,
    qk_dtype: torch.dtype,
    sparse_block_kv: int,
) -> torch.Tensor:
    """The first slot and the number of visible keys of each block, for ``fp8_fp4_paged_sparse_mqa_logits``.

    Args:
        context_lens: int32 [rows], number of keys visible to a query.
        block_table: int32 [rows, max_pages]. A slice of a wider buffer's columns stands for the buffer's whole rows, as
            in DeepGEMM.
        indices: unused; in DeepGEMM the request of each row.
        page_kv: page size, a multiple of ``sparse_block_kv``.
        sparse_kv_block_indices: int32 [rows, num_max_sparse_blocks]. Block i covers keys i · sparse_block_kv to
            (i + 1) · sparse_block_kv - 1 of the row's request; a block beyond its keys or its pages has none.
        qk_dtype: unused.
        sparse_block_kv: keys of a block.

    Returns:
        int64 [rows, num_max_sparse_blocks, 2], on the device of the arguments.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device; inconsistent arguments.
    """
    blocks = checks.tensor(
        "sparse_kv_block_indices", sparse_kv_block_indices, ("rows", "num_max_sparse_blocks"), checks.INDEX_DTYPES
    )
    rows, device = blocks.shape[0], blocks.device
    checks.indices("context_lens", context_lens, (rows,), device)
    checks.tensor("block_table", block_table, (rows, "max_pages"), checks.INDEX_DTYPES, device)
    block_table = whole_rows(block_table)
    page_kv = checks.positive_int("page_kv", page_kv)
    size = _check_block_size(sparse_block_kv, page_kv, "page_kv")
    # Clamped, so that no product overflows: blocks after the table's end and pages outside the cache stay outside.
    position = blocks.long().clamp(-1, block_table.shape[1] * page_kv) * size
    column = position // page_kv
    in_table = (column >= 0) & (column < block_table.shape[1])
    page = block_table.long().clamp(-1, torch.iinfo(torch.int64).max // page_kv - 1)
    page = page.gather(1, column.where(in_table, 0))
    num_keys = (context_lens.long().clamp_min(0).unsqueeze(1) - position).clamp(0, size)
    return torch.stack((page * page_kv + position % page_kv, num_keys.where(in_table, 0)), dim=-1)


def _sparse_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor | None,
    weights: torch.Tensor,
    metadata: torch.Tensor,
    num_blocks: int,
    block_size: int,
    backend: str | None,
) -> torch.Tensor:
    if q.dim() == 0:
        raise ValueError("q must have an axis of queries, got a scalar")
    shape = (q.shape[0], checks.positive_int("num_max_sparse_blocks", num_blocks), 2)
    checks.tensor("metadata", metadata, shape, (torch.int64,), q.device)
    with checks.naming(block_size="sparse_block_kv"):
        return sparse_index_logits(
            q,
            k,
            float32_weights(weights),
            metadata[..., 0],
            metadata[..., 1],
            block_size=block_size,
            k_scale=k_scale,
            dtype=logits_dtype_of(None, weights, True),
            backend=backend,
        )


def _check_block_size(block_size: int, page_size: int, name: str) -> int:
    block_size = checks.positive_int("sparse_block_kv", block_size)
    if page_size % block_size:
        raise ValueError(f"sparse_block_kv must divide {name}, {page_size}, got {block_size}")
    return block_size
