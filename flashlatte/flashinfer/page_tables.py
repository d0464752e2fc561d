"""Tables of pages for decode, from FlashInfer's lists: the pages of all requests in one array, with boundaries."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashlatte.runtime import checks


class DecodeRows(NamedTuple):
    """Requests, or query tokens, as ``dense_decode`` takes them; values on the host.

    Attributes:
        queries: query tokens of each row. Rows are requests, or single tokens if requests have different counts.
        tokens: query tokens of all requests.
        begins: int64 [rows], the first entry of each row in kv_indices.
        lengths: int64 [rows], keys of each row.
        max_pages: pages of the longest row.
    """

    queries: int
    tokens: int
    begins: torch.Tensor
    lengths: torch.Tensor
    max_pages: int


def on_host(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """int64 copies on the CPU. Tensors of one GPU are copied together, with one synchronization."""
    if len({tensor.device for tensor in tensors}) > 1:
        return [tensor.cpu().long() for tensor in tensors]
    joined = torch.cat(tensors).cpu().long()
    return list(joined.split([tensor.shape[0] for tensor in tensors]))


def check_boundaries(name: str, boundaries: torch.Tensor, limit: int | None = None) -> None:
    values = boundaries.tolist()
    if values != sorted(values) or values[0] < 0 or (limit is not None and values[-1] > limit):
        most = "" if limit is None else f" to {limit}"
        raise ValueError(f"{name} must not decrease, from at least 0{most}, got {values}")


def decode_rows(
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_lens: torch.Tensor,
    page_size: int,
    causal: bool,
    queries: int | None,
) -> DecodeRows:
    """The rows of requests whose values are on the host.

    ``queries``: query tokens of each row, 1 for a row for each token; None: as many as each request has, or 1 if they
    have different numbers.
    """
    counts = qo_indptr.diff()
    most, tokens = int(counts.max()), int(qo_indptr[-1])
    each = max(most if queries is None else queries, 1)
    # Requests without queries may follow those with ``each``: padding.
    whole = torch.arange(counts.shape[0] + 1, device=counts.device) * each
    uniform = tokens % each == 0 and bool((qo_indptr == whole.clamp(max=tokens)).all())
    if not uniform and queries is not None and queries > 1:
        raise ValueError(
            f"qo_indptr must have {queries} queries for each request in CUDA-graph mode, as in the first plan, got "
            f"{qo_indptr.tolist()}"
        )
    pages = kv_indptr.diff()
    lengths = torch.minimum(kv_lens, pages * page_size).clamp(min=0)
    begins = kv_indptr[:-1]
    if uniform:
        lengths = lengths.masked_fill(counts == 0, 0)
    else:
        each = 1
        request = torch.arange(counts.shape[0], device=counts.device).repeat_interleave(counts)
        behind = qo_indptr[1:][request] - 1 - torch.arange(tokens, device=counts.device)
        begins, lengths = begins[request], lengths[request]
        lengths = (lengths - behind).clamp(min=0) if causal else lengths
    max_pages = -(-int(lengths.max()) // page_size) if lengths.numel() else 0
    return DecodeRows(each, tokens, begins, lengths, max_pages)


def page_table(kv_indices: torch.Tensor, begins: torch.Tensor, columns: int) -> torch.Tensor:
    """int32 [rows, columns]: entries of kv_indices from ``begins`` [rows] on. Behind a row's pages are other rows'."""
    if kv_indices.shape[0] == 0:
        return kv_indices.new_full((begins.shape[0], columns), -1)
    entries = begins.unsqueeze(1) + torch.arange(columns, dtype=begins.dtype, device=begins.device)
    entries = entries.clamp_(max=kv_indices.shape[0] - 1).view(-1)
    return kv_indices.index_select(0, entries).view(begins.shape[0], columns)


def rounded(columns: int) -> int:
    """A width of tables for up to ``columns`` pages, at most an eighth more: a new width costs a slow first call."""
    columns = max(columns, 1)
    step = 1 << max(columns.bit_length() - 4, 0)
    return -(-columns // step) * step


def token_positions(
    boundaries: torch.Tensor, seq_lens: torch.Tensor, tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The request of each new token, its position, and whether it belongs to no request; all [tokens], on the device.

    The new tokens of a request are its last ones.
    """
    ends = boundaries[1:].contiguous()
    token = torch.arange(tokens, dtype=ends.dtype, device=ends.device)
    request = torch.searchsorted(ends, token, right=True)
    outside = request >= ends.shape[0]
    request = request.clamp_(max=ends.shape[0] - 1)
    return request, seq_lens[request] - (ends[request] - token), outside


def token_rows(cum_seq_lens_q: torch.Tensor, seq_lens: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The request of each query token, and its keys with a causal mask, both [tokens] on the device.

    Tokens of no request have no keys.
    """
    request, position, outside = token_positions(cum_seq_lens_q, seq_lens, tokens)
    return request, (position + 1).masked_fill_(outside, 0)


def check_lists(
    qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor, kv_len_arr: torch.Tensor
) -> int:
    """The number of requests. FlashInfer takes boundaries beyond those of the requests."""
    checks.indices("kv_len_arr", kv_len_arr, ("b",))
    requests = kv_len_arr.shape[0]
    for name, boundaries in (("qo_indptr", qo_indptr), ("kv_indptr", kv_indptr)):
        checks.indices(name, boundaries, ("b + 1",))
        if boundaries.shape[0] <= requests:
            raise ValueError(
                f"{name} must have {requests + 1} boundaries for kv_len_arr's {requests} requests, got "
                f"{boundaries.shape[0]}"
            )
    checks.indices("kv_indices", kv_indices, ("pages",), may_be_empty=1)
    checks.host_readable(qo_indptr=qo_indptr, kv_indptr=kv_indptr, kv_indices=kv_indices, kv_len_arr=kv_len_arr)
    return requests
