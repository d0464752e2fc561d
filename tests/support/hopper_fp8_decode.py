"""The tile algorithm of dense decode's e4m3 kernel in PyTorch: the same tiles, roundings and orders, for fixed splits.

It takes what a launch passes, so it tests the launcher too. It does not test what runs at the same time, nor the
schedule, which all kernels of dense decode share.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from support import e4m3_values

from flashlatte.kv_cache.fp8 import to_e4m3
from flashlatte.ops.dense_decode.hopper.fp8 import epilogue
from flashlatte.split_kv.gluon_device import PARTIAL

OFFSET, MARGIN = epilogue.OFFSET.value, epilogue.MARGIN.value


class Emulated:
    """Stands in for the kernel, over ``k_cache``: descriptors have addresses only."""

    def __init__(self, k_cache: torch.Tensor) -> None:
        self.k_cache = k_cache

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(_descriptors, query, table, lengths, outputs, split_grid, _uniform, _keys, **named: Any) -> None:
            config = named["CONFIG"]
            assert (config.one_byte, config.fp8, config.few_rows, config.stream_k) == (True, True, False, False)
            for cta in range(grid[0]):
                group, number = cta % split_grid.num_groups, cta // split_grid.num_groups
                local_item, split = divmod(number, split_grid.num_splits)
                item = split_grid.first_item + local_item
                length = min(max(int(lengths.lengths[item]), 0), lengths.limit)
                steps = max(-(-length // 128), 1)
                size = max(-(-steps // config.max_splits), config.split_steps)
                splits = -(-steps // size)
                if split >= splits:
                    continue
                kv_head = group // split_grid.groups_per_head
                first_row = group % split_grid.groups_per_head * 64
                request = _Request(self, query, table, item, kv_head, first_row, length, named)
                out, lse2 = request.attend(range(split * size, min((split + 1) * size, steps)))
                rows = min(outputs.rows - first_row, 64)
                if splits == 1:
                    request.write(outputs, out[:rows], lse2[:rows])
                    continue
                partial = (local_item * split_grid.num_groups + group) * split_grid.num_splits + split
                target = named["scratch"][partial * PARTIAL.value :][: PARTIAL.value]
                target[: 64 * 512].view(64, 512)[:rows], target[64 * 512 :][:rows] = out[:rows], lse2[:rows]

        return launch


def quantize(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The latents [64, 512], both terms of the rope [64, 2, d - 512], and the scales [64]."""
    q = q.float()
    bits = (q.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(1).clamp_min(1e-30) * (1 / 448)).view(torch.int32)
    scale = ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    scaled = q * (1 / scale)[:, None]
    rope = scaled[:, 512:].contiguous().view(torch.int32)
    first = ((rope + 0x7FFFF + (rope >> 20 & 1)) & -0x100000).view(torch.float32)
    terms = torch.stack((first, scaled[:, 512:] - first), 1)
    return to_e4m3(scaled[:, :512]).float(), to_e4m3(terms).float(), scale


class _Request(NamedTuple):
    """A split's request, and its rows: those of a group."""

    kernel: Emulated
    query: Any
    table: Any
    item: int
    kv_head: int
    first_row: int
    length: int
    named: dict[str, Any]

    def rows(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The rows that exist, their tokens and heads."""
        row = self.first_row + torch.arange(64)
        row = row[row < self.query.rows]
        return row, row // self.query.heads, self.kv_head * self.query.heads + row % self.query.heads

    def queries(self) -> torch.Tensor:
        _, token, head = self.rows()
        q, query = self.query.q, self.query
        start = 8 * (self.item * query.stride_request + token * query.stride_token + head * query.stride_head)
        flat = q.as_strided((q.untyped_storage().size() // q.itemsize - q.storage_offset(),), (1,))
        found = torch.zeros(64, q.shape[3], dtype=q.dtype)
        found[: len(start)] = flat[start[:, None] + torch.arange(q.shape[3])]
        return found

    def block(self, number: int) -> torch.Tensor:
        """The bytes of a block's keys [64, d], 0 where TMA fills zeros."""
        cache = self.kernel.k_cache
        pages, page_size, _, width = cache.shape
        found = torch.zeros(64, width, dtype=torch.uint8)
        for key in range(64):
            position = number * 64 + key
            column = min(position, max(self.length - 1, 0)) // page_size
            page = int(self.table.pages[self.item, column])
            last_box = -(-self.length // min(page_size, 64)) * min(page_size, 64)
            if position < last_box and 0 <= page < pages:
                found[key] = cache[page, position % page_size, self.kv_head].view(torch.uint8)
        return found

    def is_absent(self, number: int) -> torch.Tensor:
        """Which keys of a block have a page that is not in the cache."""
        pages, page_size = self.kernel.k_cache.shape[:2]
        column = torch.arange(number * 64, number * 64 + 64) // page_size
        page = self.table.pages[self.item, column.clamp_max(self.table.pages.shape[1] - 1)]
        return (page < 0) | (page >= pages)

    def attend(self, steps: range) -> tuple[torch.Tensor, torch.Tensor]:
        """The normalized output [64, 512] and base-2 lse [64]."""
        k_scale = self.named["k_scale"] * (1 if (x := self.named["k_scale_tensor"]) is None else float(x))
        latent, rope_terms, scale = quantize(self.queries())
        factor = (scale * (self.named["scale"] * k_scale))[:, None]
        seen_by_all = self.length - self.named["causal_offset"]
        token = (self.first_row + torch.arange(64)) // self.query.heads
        seen = (seen_by_all + token).clamp_max(self.length)[:, None]
        halves = [[torch.zeros(64, 64) for _ in range(4)] for _ in range(2)]
        row_max, sums = torch.full((64, 1), -1e30), torch.zeros(64, 1)
        for number in range(2 * steps.start, 2 * steps.stop):
            keys = self.block(number)
            values = keys.view(torch.float8_e4m3fn).float()
            scores = latent @ values[:, :512].T
            for term in range(2 if values.shape[1] > 512 else 0):
                scores += rope_terms[:, term] @ values[:, 512:].T
            position = number * 64 + torch.arange(64)
            scores = scores.masked_fill((position >= seen) | self.is_absent(number), -torch.inf)
            keys[position >= self.length] = 0
            block_max = scores.nan_to_num(nan=-torch.inf, neginf=-torch.inf).amax(1, keepdim=True) * factor
            new_max = torch.where(block_max - row_max > MARGIN, block_max, row_max)
            alpha, row_max = torch.exp2(row_max - new_max), new_max
            p = torch.exp2(scores * factor - (row_max - OFFSET))
            sums = sums * alpha + p.sum(1, keepdim=True)
            # The order of ``_publish_p``.
            p = to_e4m3(p).float().reshape(64, 4, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(64, 64)
            memory = e4m3_values.swizzled(keys[:, :512])
            for side, tiles in enumerate(halves):
                for i in range(4):
                    operand = e4m3_values.load_columns(memory, side * 64 * 256, i).view(torch.float8_e4m3fn)
                    tiles[i] = tiles[i] * alpha.T + operand.float() @ p.T
        # The order of ``epilogue._in_order``.
        ordered = [tile.reshape(4, 2, 8, 64).permute(3, 0, 2, 1).reshape(64, 64) for tile in halves[0] + halves[1]]
        inverse = torch.where(sums == 0, 0.0, 1 / sums)
        lse2 = torch.where(sums == 0, -torch.inf, row_max - OFFSET + torch.log2(sums))
        return torch.cat(ordered, 1) * inverse * k_scale, lse2[:, 0]

    def write(self, outputs: Any, out: torch.Tensor, lse2: torch.Tensor) -> None:
        _, token, head = self.rows()
        outputs.out[self.item, token, head] = out.to(outputs.out.dtype)
        lse = torch.where(lse2.isneginf(), outputs.empty_lse, lse2 * 0.6931471805599453)
        outputs.lse[self.item, head, token] = lse


def combine(plan, scratch, outputs, _row_align, first_item, items) -> None:
    """Stands in for ``launch_combine``, for fixed splits that all have been written."""
    if not plan.combines:
        return
    groups_per_head = plan.groups_per_head
    partials = scratch[: items * plan.groups * plan.splits * PARTIAL.value].view(items, plan.groups, plan.splits, -1)
    for item in range(items):
        for group in range(plan.groups):
            row = group % groups_per_head * 64 + torch.arange(64)
            row = row[row < outputs.rows]
            of_group = partials[item, group, :, :]
            lse2 = of_group[:, 64 * 512 :][:, : len(row)]
            written = ~lse2[:, 0].isnan()
            if not written.any():
                continue
            lse2 = lse2[written]
            values = of_group[written, : 64 * 512].view(-1, 64, 512)[:, : len(row)]
            total = torch.logsumexp(lse2 * 0.6931471805599453, 0)
            weight = torch.exp2(lse2 - total / 0.6931471805599453).nan_to_num(nan=0.0)
            token, head = row // outputs.heads, group // groups_per_head * outputs.heads + row % outputs.heads
            outputs.out[first_item + item, token, head] = (weight[..., None] * values).sum(0).to(outputs.out.dtype)
            outputs.lse[first_item + item, head, token] = total
