"""Functions for the tables of a paged cache, and ``append_paged_mla_kv_cache``, which writes to it."""

from __future__ import annotations

import functools

import torch

from flashlatte.flashinfer.conventions import joined
from flashlatte.flashinfer.page_tables import token_positions
from flashlatte.ops.cache_write import cache_write
from flashlatte.runtime import checks


def get_seq_lens(kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    """Keys of each request.

    Args:
        kv_indptr: int32 or int64 [b + 1], the number of pages before each request.
        kv_last_page_len: int32 or int64 [b], tokens in the last page of each request.
        page_size: tokens in a page.

    Returns:
        [b]; 0 for a request without pages.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device.
    """
    checks.indices("kv_indptr", kv_indptr, ("b + 1",))
    checks.indices("kv_last_page_len", kv_last_page_len, (kv_indptr.shape[0] - 1,), kv_indptr.device, may_be_empty=1)
    pages = kv_indptr.diff()
    lengths = (pages - 1) * checks.positive_int("page_size", page_size) + kv_last_page_len.to(pages.dtype)
    return lengths.masked_fill_(pages <= 0, 0)


def get_batch_indices_positions(
    append_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    nnz: int,
    batch_indices: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The request and the position of each appended token.

    Args:
        append_indptr: int32 or int64 [b + 1], boundaries of the requests' new tokens, from 0.
        seq_lens: int32 or int64 [b], keys of each request after the new tokens are appended.
        nnz: number of entries of the results, at least append_indptr[-1].
        batch_indices, positions: int32 [nnz] to write to.

    Returns:
        ``batch_indices`` and ``positions``, int32 [nnz]: the new tokens of a request are its last. Entries from
        append_indptr[-1] on are -1 and 0.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device.
    """
    checks.indices("append_indptr", append_indptr, ("b + 1",))
    checks.indices("seq_lens", seq_lens, (append_indptr.shape[0] - 1,))
    nnz, device = checks.positive_int("nnz", nnz, or_zero=True), append_indptr.device
    if device.type != "meta":
        checks.host_readable(seq_lens=seq_lens)
    batch_indices = checks.output_or_new("batch_indices", batch_indices, (nnz,), torch.int32, device)
    positions = checks.output_or_new("positions", positions, (nnz,), torch.int32, device)
    request, position, is_padding = token_positions(append_indptr, seq_lens.to(device), nnz)
    batch_indices.copy_(request.masked_fill(is_padding, -1))
    positions.copy_(position.masked_fill(is_padding, 0))
    return batch_indices, positions


def append_paged_mla_kv_cache(
    append_ckv: torch.Tensor,
    append_kpe: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
) -> None:
    """Write new tokens to a paged cache: ``flashlatte.kv_cache.write``.

    The caches may be two tensors, but ``BatchMLAPagedAttentionWrapper`` reads columns of one only. One kernel writes
    those, unless torch.compile traces the call; otherwise there are two.

    Args:
        append_ckv: [n, ckv], in the caches' dtype.
        append_kpe: [n, kpe], likewise.
        batch_indices: int32 or int64 [n], the request of each token. A token of a request outside kv_indptr is skipped.
        positions: int32 or int64 [n], its position in the request.
        ckv_cache: [pages, page_size, ckv], bf16 or fp16 (float32 on the reference).
        kpe_cache: [pages, page_size, kpe], likewise.
        kv_indices: int32 or int64, the pages of all requests. Pages outside the cache are skipped.
        kv_indptr: int32 or int64 [b + 1], the first entry of each request in kv_indices.
        kv_last_page_len: unused, as positions say where a token goes.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape, stride or device.
    """
    checks.tensor("ckv_cache", ckv_cache, ("pages", "page_size", "ckv"), checks.FLOAT_DTYPES)
    pages, page_size, width = ckv_cache.shape
    dtype, device = (ckv_cache.dtype,), ckv_cache.device
    checks.tensor("kpe_cache", kpe_cache, (pages, page_size, "kpe"), dtype, device)
    for name, cache in (("ckv_cache", ckv_cache), ("kpe_cache", kpe_cache)):
        checks.writable(name, cache)
    checks.tensor("append_ckv", append_ckv, ("n", width), dtype, device, may_be_empty=1)
    tokens = append_ckv.shape[0]
    checks.tensor("append_kpe", append_kpe, (tokens, kpe_cache.shape[2]), dtype, device, may_be_empty=1)
    for name, index in (("batch_indices", batch_indices), ("positions", positions)):
        checks.indices(name, index, (tokens,), device, may_be_empty=1)
    checks.indices("kv_indices", kv_indices, ("entries",), device, may_be_empty=1)
    checks.indices("kv_indptr", kv_indptr, ("b + 1",), device)
    write = functools.partial(cache_write, request_ids=batch_indices, page_indices=kv_indices, page_indptr=kv_indptr)
    # torch.compile traces no addresses.
    cache = None if torch.compiler.is_compiling() else joined(ckv_cache, kpe_cache)
    if cache is not None:
        write(cache, positions, append_ckv, rope=append_kpe)
    else:
        write(ckv_cache, positions, append_ckv)
        write(kpe_cache, positions, append_kpe)
