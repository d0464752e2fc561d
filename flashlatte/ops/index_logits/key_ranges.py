"""The records of queries and their keys that the kernels share."""

from __future__ import annotations

from typing import Any, NamedTuple

from flashlatte.ops.index_logits.reference import IndexLogitsParams, PagedIndexLogitsParams
from flashlatte.runtime.kernel_records import Constant, ElementPointer, Int32, Int64


class KeyRanges(NamedTuple):
    """The first key and the end (exclusive) of each query, [rows]."""

    start: ElementPointer
    start_stride: Int64
    end: ElementPointer
    end_stride: Int64


class QueryLengths(NamedTuple):
    """The keys of paged queries.

    Attributes:
        lengths: [requests, next_n] with ``per_query``: the number of keys of each query. Otherwise [requests]: the
            number of keys of the last query of a request; each other query has one key fewer than the next, and
            token_stride is 0.
        max_keys: maximum number of keys, limited by the block table and the logits.
        next_n: queries of a request; ``group``: queries of a tile.
    """

    lengths: ElementPointer
    request_stride: Int64
    token_stride: Int64
    per_query: Constant
    max_keys: Int32
    requests: Int32
    next_n: Int32
    group: Constant


class LogitRows(NamedTuple):
    """Rows of logits of a tile's queries, [queries]: begin and end of the visible keys, and the address of key 0.

    ``start`` is None for 0.
    """

    start: Any
    end: Any
    address: Any


def key_ranges(params: IndexLogitsParams) -> KeyRanges:
    start, end = params.key_start, params.key_end
    return KeyRanges(start, start.stride(0), end, end.stride(0))


def query_lengths(params: PagedIndexLogitsParams, group: int) -> QueryLengths:
    lengths, block_table = params.cache_seqlens, params.block_table
    requests, next_n = params.q.shape[:2]
    per_query = lengths.dim() == 2 and next_n > 1
    return QueryLengths(
        lengths,
        lengths.stride(0),
        lengths.stride(1) if per_query else 0,
        per_query,
        min(params.logits.shape[1], block_table.shape[1] * params.cache.shape[1]),
        requests,
        next_n,
        group,
    )
