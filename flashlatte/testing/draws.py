"""Random tensors, lengths, pages and selections for ``cases``."""

from __future__ import annotations

from dataclasses import dataclass

import torch

UNREACHED_PAGE = 2_147_480_000  # FlashMLA's tests use it for unused entries of the block table
INT32_LIMITS = (-(2**31), 2**31 - 1)
BEYOND_INT32 = (2**32, -(2**40))  # truncation to 32 bits would give 0
RANDOM_BYTES = 2**28


@dataclass(frozen=True)
class PagedRequests:
    """Requests with pages in random order.

    Attributes:
        lengths: number of keys of each request.
        table: the pages of each request; rows of equal length with at least one entry.
        tokens_in_page: number of tokens of each page that belong to a request; 0 for unused pages.
    """

    lengths: list[int]
    table: list[list[int]]
    tokens_in_page: list[int]


class Draw:
    """Seeded random data. Lengths and pages come from a CPU generator and are the same for every device."""

    def __init__(self, seed: int, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.on_host = torch.Generator().manual_seed(seed)
        self.on_device = torch.Generator(self.device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype, factor: float = 0.1, offset: float = 0.0) -> torch.Tensor:
        """randn · factor + offset, clamped to ±1."""
        x = torch.randn(shape, generator=self.on_device, device=self.device, dtype=dtype)
        return x.mul_(factor).add_(offset).clamp_(-1, 1)

    def uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self.on_device, device=self.device)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """int64 from low to high - 1."""
        return torch.randint(low, high, shape, generator=self.on_device, device=self.device)

    def lengths(self, requests: int, mean: int, at_least: int, varlen: bool, zero_lengths: bool) -> list[int]:
        """``mean`` for each request, or N(mean, mean / 2) with ``varlen``; ``zero_lengths`` sets about half to 0."""
        lengths = torch.full((requests,), float(mean))
        if varlen:
            lengths += torch.randn(requests, generator=self.on_host) * mean / 2
        lengths = lengths.round().clamp_min(at_least)
        if zero_lengths:
            lengths[torch.rand(requests, generator=self.on_host) < 0.5] = 0
        return [int(length) for length in lengths]

    def pages(self, lengths: list[int], page_size: int) -> PagedRequests:
        """Pages for requests of these lengths, and two unused pages."""
        counts = [-(-length // page_size) for length in lengths]
        order = torch.randperm(sum(counts) + 2, generator=self.on_host).tolist()
        tokens_in_page = [0] * len(order)
        table = []
        for length, count in zip(lengths, counts, strict=True):
            pages, order = order[:count], order[count:]
            for index, page in enumerate(pages):
                tokens_in_page[page] = min(length - index * page_size, page_size)
            table.append(pages + [UNREACHED_PAGE] * (max(*counts, 1) - count))
        return PagedRequests(lengths, table, tokens_in_page)

    def sinks(self, heads: int) -> torch.Tensor:
        """float32 sinks: about a third inf, a third -inf."""
        kind = self.uniform(heads)
        sinks = torch.randn(heads, generator=self.on_device, device=self.device)
        return sinks.masked_fill(kind < 0.31, torch.inf).masked_fill(kind > 0.69, -torch.inf)

    def choices(self, rows: int, topk: int, tokens: int, duplicates: bool) -> torch.Tensor:
        """int64 [rows, topk]: distinct tokens from 0 to tokens - 1 in random order, padded with -1.

        ``duplicates`` repeats each token. Odd rows are reversed, so their padding comes first.
        """
        chosen = torch.full((rows, topk), -1, dtype=torch.int64, device=self.device)
        count = min(topk, tokens)
        if count:
            chunk_rows = max(1, RANDOM_BYTES // (4 * tokens))
            for begin in range(0, rows, chunk_rows):
                chunk = chosen[begin : begin + chunk_rows]
                chunk[:, :count] = self.uniform(chunk.shape[0], tokens).topk(count, dim=-1).indices
        if duplicates:
            chosen[:, 1::2] = chosen[:, 0::2][:, : topk // 2]
        chosen[1::2] = chosen[1::2].flip(-1)
        return chosen

    def drop(self, indices: torch.Tensor, invalid_share: float, empty_rows: float) -> torch.Tensor:
        """Replace a fraction of the indices [..., topk], and all indices of a fraction of the rows, by -1."""
        dropped = self.uniform(*indices.shape) < invalid_share
        dropped |= (self.uniform(*indices.shape[:-1]) < empty_rows).unsqueeze(-1)
        return indices.masked_fill(dropped, -1)

    def fill_invalid(self, indices: torch.Tensor, limit: int, dtype: torch.dtype) -> torch.Tensor:
        """Replace -1 by invalid indices of every kind: negative, ``limit`` and above, the limits of the dtype."""
        kinds = (-1, -2, -limit, limit, limit + 1, *INT32_LIMITS, *(BEYOND_INT32 if dtype == torch.int64 else ()))
        fillers = torch.tensor(kinds, device=self.device)[self.integers(0, len(kinds), *indices.shape)]
        return torch.where(indices < 0, fillers, indices).to(dtype)


def selection_mask(indices: torch.Tensor, limit: int, topk_length: torch.Tensor | None) -> torch.Tensor:
    """Mask of the indices [..., topk] that select a token; ``topk_length`` has their leading axes, or the first."""
    valid = (indices >= 0) & (indices < limit)
    if topk_length is None:
        return valid
    length = topk_length.reshape(*topk_length.shape, *[1] * (indices.dim() - topk_length.dim()))
    return valid & (torch.arange(indices.shape[-1], device=indices.device) < length)


def with_gaps(x: torch.Tensor) -> torch.Tensor:
    """A copy of x [..., n, d] with gaps before and between its rows, filled with NaN or the largest int."""
    gap = torch.nan if x.is_floating_point() else torch.iinfo(x.dtype).max
    storage = torch.full((*x.shape[:-2], x.shape[-2] + 1, x.shape[-1] + 8), gap, dtype=x.dtype, device=x.device)
    view = storage[..., 1:, : x.shape[-1]]
    view.copy_(x)
    return view


def in_two_parts(q: torch.Tensor, width: int, gaps: bool = False) -> dict[str, torch.Tensor]:
    """The first ``width`` columns of queries [..., h, d] as ``q``, and the others as ``q_rope``, with the strides that
    a model's have: q is the result of a matmul for each head, q_rope a view of wider rows. ``gaps``: ``with_gaps``."""
    by_head = q[..., :width].movedim(-2, 0).contiguous()
    wider = torch.full((*q.shape[:-1], q.shape[-1] - width + 128), torch.nan, dtype=q.dtype, device=q.device)
    wider[..., 128:] = q[..., width:]
    return {"q": (with_gaps(by_head) if gaps else by_head).movedim(0, -2), "q_rope": wider[..., 128:]}
