"""Random tensors, lengths, pages and selections that ``cases`` puts together."""

from __future__ import annotations

from dataclasses import dataclass

import torch

UNREACHED_PAGE = 2_147_480_000  # FlashMLA's tests put it in table entries that no length reaches
INT32_LIMITS = (-(2**31), 2**31 - 1)
BEYOND_INT32 = (2**32, -(2**40))  # valid once truncated to 32 bits, or nearly
RANDOM_BYTES = 2**28


@dataclass(frozen=True)
class PagedRequests:
    """Requests spread over pages in random order.

    Attributes:
        lengths: keys of each request.
        table: the pages of each request, all rows equally long, at least one entry.
        tokens_in_page: how many tokens of each page belong to a request; pages of no request have 0.
    """

    lengths: list[int]
    table: list[list[int]]
    tokens_in_page: list[int]


class Draw:
    """Lengths and pages come from the CPU's generator, alike on every device; data from the device's."""

    def __init__(self, seed: int, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.on_host = torch.Generator().manual_seed(seed)
        self.on_device = torch.Generator(self.device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype, factor: float = 0.1, offset: float = 0.0) -> torch.Tensor:
        """randn · factor + offset, within ±1."""
        x = torch.randn(shape, generator=self.on_device, device=self.device, dtype=dtype)
        return x.mul_(factor).add_(offset).clamp_(-1, 1)

    def uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self.on_device, device=self.device)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """int64 from low to high - 1."""
        return torch.randint(low, high, shape, generator=self.on_device, device=self.device)

    def lengths(self, requests: int, mean: int, at_least: int, varlen: bool, zero_lengths: bool) -> list[int]:
        """``mean`` each, or N(mean, mean / 2); with ``zero_lengths`` about half of them 0."""
        lengths = torch.full((requests,), float(mean))
        if varlen:
            lengths += torch.randn(requests, generator=self.on_host) * mean / 2
        lengths = lengths.round().clamp_min(at_least)
        if zero_lengths:
            lengths[torch.rand(requests, generator=self.on_host) < 0.5] = 0
        return [int(length) for length in lengths]

    def pages(self, lengths: list[int], page_size: int) -> PagedRequests:
        """Pages for requests of these lengths, and two spare ones."""
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
        """float32 sinks, about a third of them inf and a third -inf."""
        kind = self.uniform(heads)
        sinks = torch.randn(heads, generator=self.on_device, device=self.device)
        return sinks.masked_fill(kind < 0.31, torch.inf).masked_fill(kind > 0.69, -torch.inf)

    def choices(self, rows: int, topk: int, tokens: int, duplicates: bool) -> torch.Tensor:
        """int64 [rows, topk]: different tokens of 0 to tokens - 1 in random order, or each twice; -1 for want of them.

        Odd rows are reversed, so that the missing ones stand first there.
        """
        chosen = torch.full((rows, topk), -1, dtype=torch.int64, device=self.device)
        count = min(topk, tokens)
        if count:
            at_a_time = max(1, RANDOM_BYTES // (4 * tokens))
            for begin in range(0, rows, at_a_time):
                part = chosen[begin : begin + at_a_time]
                part[:, :count] = self.uniform(part.shape[0], tokens).topk(count, dim=-1).indices
        if duplicates:
            chosen[:, 1::2] = chosen[:, 0::2][:, : topk // 2]
        chosen[1::2] = chosen[1::2].flip(-1)
        return chosen

    def drop(self, indices: torch.Tensor, invalid_share: float, empty_rows: float) -> torch.Tensor:
        """-1 in place of a share of the indices [..., topk], and of all indices of a share of the rows."""
        dropped = self.uniform(*indices.shape) < invalid_share
        dropped |= (self.uniform(*indices.shape[:-1]) < empty_rows).unsqueeze(-1)
        return indices.masked_fill(dropped, -1)

    def fill_invalid(self, indices: torch.Tensor, limit: int, dtype: torch.dtype) -> torch.Tensor:
        """Every kind of invalid index in place of -1: negative, from ``limit`` on, the ends of the dtype."""
        kinds = (-1, -2, -limit, limit, limit + 1, *INT32_LIMITS, *(BEYOND_INT32 if dtype == torch.int64 else ()))
        fillers = torch.tensor(kinds, device=self.device)[self.integers(0, len(kinds), *indices.shape)]
        return torch.where(indices < 0, fillers, indices).to(dtype)


def counted(indices: torch.Tensor, limit: int, topk_length: torch.Tensor | None) -> torch.Tensor:
    """Which of the indices [..., topk] select something; ``topk_length`` has the leading axes, or the first of them."""
    valid = (indices >= 0) & (indices < limit)
    if topk_length is None:
        return valid
    length = topk_length.reshape(*topk_length.shape, *[1] * (indices.dim() - topk_length.dim()))
    return valid & (torch.arange(indices.shape[-1], device=indices.device) < length)


def apart(x: torch.Tensor) -> torch.Tensor:
    """x [..., n, d] with gaps between its rows and before the first of every n, NaN or the largest int in the gaps."""
    gap = torch.nan if x.is_floating_point() else torch.iinfo(x.dtype).max
    storage = torch.full((*x.shape[:-2], x.shape[-2] + 1, x.shape[-1] + 8), gap, dtype=x.dtype, device=x.device)
    view = storage[..., 1:, : x.shape[-1]]
    view.copy_(x)
    return view
