"""vLLM's conversion of the token positions that an indexer selected to cache slots."""

from __future__ import annotations

import torch

from flashlatte.ops.index_convert import index_convert
from flashlatte.runtime import checks


def triton_convert_req_index_to_global_index(
    req_id: torch.Tensor,
    block_table: torch.Tensor,
    token_indices: torch.Tensor,
    BLOCK_SIZE: int = 64,
    NUM_TOPK_TOKENS: int = 2048,
    BLOCK_N: int = 128,
    HAS_PREFILL_WORKSPACE: bool = False,
    prefill_workspace_request_ids: torch.Tensor | None = None,
    prefill_workspace_starts: torch.Tensor | None = None,
    return_valid_counts: bool = False,
    *,
    BLOCK_STRIDE_ROWS: int | None = None,
    prefill_workspace_rank_stride: int | None = None,
    dcp_size: int = 1,
    dcp_rank: int = 0,
    cp_kv_cache_interleave_size: int = 1,
    out: torch.Tensor | None = None,
    valid_counts_out: torch.Tensor | None = None,
    idx_mapping: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Slots of the tokens that the indexer selected for each query: ``index_convert``.

    Args:
        req_id: int32 or int64 [T], each query's request.
        block_table: int32 or int64 [b, max_pages].
        token_indices: int32 or int64 [T, NUM_TOPK_TOKENS], positions within the request; negative for none.
        BLOCK_SIZE: tokens in a page.
        NUM_TOPK_TOKENS: columns of token_indices.
        BLOCK_N: unused.
        HAS_PREFILL_WORKSPACE: whether to use the next two arguments.
        prefill_workspace_request_ids: int32 or int64 [T]. If id ≥ 0, the query's tokens are contiguous in a workspace
            and position p is prefill_workspace_starts[id] + p. Positions beyond the block table give -1 there too.
        prefill_workspace_starts: int32 or int64 [n].
        return_valid_counts: also return the number of valid slots of each row, and move them to its front, in order.
        BLOCK_STRIDE_ROWS: rows between the starts of consecutive pages, at least BLOCK_SIZE; BLOCK_SIZE if None.
        prefill_workspace_rank_stride: rows of each rank in a workspace that concatenates the tokens of all ranks; 0 if
            None.
        dcp_size, dcp_rank, cp_kv_cache_interleave_size: token t is on rank (t // interleave) % size. On other ranks its
            slot is -1, except in a workspace. The table covers this rank's tokens.
        out: token_indices' shape, int32 or int64, written and returned.
        valid_counts_out: int32 [T], written and returned with ``return_valid_counts``.
        idx_mapping: int32 or int64 [n], the row of block_table for each request; negative values mean row 0.

    Returns:
        Slots in the dtype and shape of token_indices; -1 for no token and for a token whose page is not in the table.
        With ``return_valid_counts`` also the counts, int32 [T].

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device; inconsistent arguments.
    """
    _check(token_indices, NUM_TOPK_TOKENS, return_valid_counts)
    checks.flag("HAS_PREFILL_WORKSPACE", HAS_PREFILL_WORKSPACE)
    if out is not None:
        checks.output("out", out, tuple(token_indices.shape), checks.INDEX_DTYPES, token_indices.device, may_be_empty=1)
    if valid_counts_out is not None:
        if not return_valid_counts:
            raise ValueError("valid_counts_out needs return_valid_counts=True, got False")
        checks.output("valid_counts_out", valid_counts_out, (token_indices.shape[0],), (torch.int32,))
    sharding = _sharding(dcp_rank, dcp_size, cp_kv_cache_interleave_size)
    workspace = None
    if HAS_PREFILL_WORKSPACE:
        workspace = checks.given("prefill_workspace_request_ids", prefill_workspace_request_ids)
        checks.given("prefill_workspace_starts", prefill_workspace_starts)
        token_indices = _over_ranks(
            _drop_beyond_table(token_indices, block_table, BLOCK_SIZE, sharding),
            workspace,
            sharding,
            0 if prefill_workspace_rank_stride is None else prefill_workspace_rank_stride,
        )
    names = {"workspace_ids": "prefill_workspace_request_ids", "workspace_starts": "prefill_workspace_starts"}
    with checks.naming(indices="token_indices", request_ids="req_id", page_size="BLOCK_SIZE", slots="out", **names):
        slots, counts = index_convert(
            token_indices,
            _table(block_table, BLOCK_SIZE, BLOCK_STRIDE_ROWS, (token_indices if out is None else out).dtype),
            BLOCK_SIZE,
            request_ids=req_id if idx_mapping is None else _mapped(req_id, idx_mapping),
            workspace_ids=workspace,
            workspace_starts=prefill_workspace_starts if HAS_PREFILL_WORKSPACE else None,
            sharding=sharding,
            compact=return_valid_counts,
            return_counts=True,
            slots=out,
            dtype=token_indices.dtype,
        )
    _spread(slots, BLOCK_SIZE, BLOCK_STRIDE_ROWS, workspace)
    if valid_counts_out is not None:
        counts = valid_counts_out.copy_(counts)
    return (slots, counts) if return_valid_counts else slots


def triton_filter_and_convert_dcp_index(
    req_id: torch.Tensor,
    block_table: torch.Tensor,
    token_indices: torch.Tensor,
    dcp_size: int,
    dcp_rank: int,
    cp_kv_cache_interleave_size: int = 1,
    BLOCK_SIZE: int = 64,
    NUM_TOPK_TOKENS: int = 2048,
    BLOCK_N: int = 128,
    return_valid_counts: bool = False,
    compact_valid_to_front: bool = True,
    *,
    BLOCK_STRIDE_ROWS: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Slots of the selected tokens that are on this rank of a context-parallel group: ``index_convert``.

    Arguments and results as ``triton_convert_req_index_to_global_index``, and:

    Args:
        dcp_size, dcp_rank, cp_kv_cache_interleave_size: token t is on rank (t // interleave) % size. The table
            covers this rank's tokens.
        compact_valid_to_front: move the valid slots of a row to its front, in order. With one rank this is
            ``return_valid_counts`` instead, as in vLLM.
    """
    _check(token_indices, NUM_TOPK_TOKENS, return_valid_counts)
    checks.flag("compact_valid_to_front", compact_valid_to_front)
    sharding = _sharding(dcp_rank, dcp_size, cp_kv_cache_interleave_size)
    with checks.naming(indices="token_indices", request_ids="req_id", page_size="BLOCK_SIZE"):
        slots, counts = index_convert(
            token_indices,
            _table(block_table, BLOCK_SIZE, BLOCK_STRIDE_ROWS, token_indices.dtype),
            BLOCK_SIZE,
            request_ids=req_id,
            sharding=sharding,
            compact=compact_valid_to_front if sharding[1] > 1 else return_valid_counts,
            return_counts=True,
            dtype=token_indices.dtype,
        )
    _spread(slots, BLOCK_SIZE, BLOCK_STRIDE_ROWS, None)
    return (slots, counts) if return_valid_counts else slots


def _check(token_indices: torch.Tensor, width: int, return_valid_counts: bool) -> None:
    checks.integer("NUM_TOPK_TOKENS", width)
    checks.flag("return_valid_counts", return_valid_counts)
    checks.tensor("token_indices", token_indices, ("T", "width"), checks.INDEX_DTYPES, may_be_empty=2)
    if token_indices.shape[1] != width:
        got = list(token_indices.shape)
        raise ValueError(f"token_indices must have shape [T, {width}] (NUM_TOPK_TOKENS), got {got}")


def _sharding(rank: int, size: int, interleave: int) -> tuple[int, int, int]:
    """``index_convert``'s sharding, checked under vLLM's argument names."""
    rank = checks.positive_int("dcp_rank", rank, or_zero=True)
    size = checks.positive_int("dcp_size", size)
    if rank >= size:
        raise ValueError(f"dcp_rank must be below dcp_size {size}, got {rank}")
    return rank, size, checks.positive_int("cp_kv_cache_interleave_size", interleave)


def _mapped(req_id: torch.Tensor, idx_mapping: torch.Tensor) -> torch.Tensor:
    """block_table's row of each query; -1 for a request that idx_mapping does not have."""
    checks.indices("req_id", req_id, ("T",), may_be_empty=1)
    checks.indices("idx_mapping", idx_mapping, ("n",), req_id.device)
    known = (req_id >= 0) & (req_id < idx_mapping.shape[0])
    return torch.where(known, idx_mapping.clamp(min=0)[torch.where(known, req_id, 0)], -1)


def _local(token_indices: torch.Tensor, sharding: tuple[int, int, int]) -> torch.Tensor:
    """Positions of tokens among those of their own rank."""
    _, size, interleave = sharding
    return token_indices // (size * interleave) * interleave + token_indices % interleave


def _drop_beyond_table(
    token_indices: torch.Tensor, block_table: torch.Tensor, page_size: int, sharding: tuple[int, int, int]
) -> torch.Tensor:
    """Replace tokens beyond the block table by -1: in a workspace they would be another request's."""
    checks.tensor("block_table", block_table, ("b", "max_pages"), checks.INDEX_DTYPES, may_be_empty=2)
    tokens = block_table.shape[1] * checks.positive_int("BLOCK_SIZE", page_size)
    return token_indices.masked_fill(_local(token_indices, sharding) >= tokens, -1)


def _over_ranks(
    token_indices: torch.Tensor, workspace: torch.Tensor, sharding: tuple[int, int, int], rank_stride: int
) -> torch.Tensor:
    """Positions in a workspace that concatenates all ranks' tokens, for the queries that have a workspace."""
    ids, shape = "prefill_workspace_request_ids", token_indices.shape[:1]
    checks.indices(ids, workspace, tuple(shape), token_indices.device)
    rank_stride = checks.positive_int("prefill_workspace_rank_stride", rank_stride, or_zero=True)
    _, size, interleave = sharding
    if size == 1:
        return token_indices
    gathered = token_indices // interleave % size * rank_stride + _local(token_indices, sharding)
    return torch.where((workspace >= 0).unsqueeze(1) & (token_indices >= 0), gathered, token_indices)


def _table(block_table: torch.Tensor, page_size: int, stride_rows: int | None, dtype: torch.dtype) -> torch.Tensor:
    """block_table with -1 for pages whose slots, at ``stride_rows`` a page, would overflow dtype."""
    page_size = checks.positive_int("BLOCK_SIZE", page_size)
    if stride_rows is None or checks.positive_int("BLOCK_STRIDE_ROWS", stride_rows) == page_size:
        return block_table
    checks.tensor("block_table", block_table, ("b", "max_pages"), checks.INDEX_DTYPES, may_be_empty=2)
    if stride_rows < page_size:
        raise ValueError(f"BLOCK_STRIDE_ROWS must be BLOCK_SIZE {page_size} or more, got {stride_rows}")
    last = (torch.iinfo(dtype).max - page_size + 1) // stride_rows
    return block_table.where(block_table <= min(last, torch.iinfo(block_table.dtype).max), -1)


def _spread(slots: torch.Tensor, page_size: int, stride_rows: int | None, workspace: torch.Tensor | None) -> None:
    """Convert slots of adjacent pages to slots of pages ``stride_rows`` apart, in place."""
    if stride_rows is None or stride_rows == page_size:
        return
    in_page = slots >= 0 if workspace is None else (slots >= 0) & (workspace < 0).unsqueeze(1)
    slots.add_(torch.where(in_page, slots // page_size * (stride_rows - page_size), 0))
