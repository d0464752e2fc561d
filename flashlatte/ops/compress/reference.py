"""``compress``: the arguments, and the specification in plain PyTorch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashlatte.kernels.rope import rotate_tail
from flashlatte.kv_cache.formats import CacheFormat
from flashlatte.kv_cache.registry import as_format
from flashlatte.kv_cache.row_caches import encode_rows
from flashlatte.kv_cache.slots import in_cache, write_slots


class CompressParams(NamedTuple):
    """The checked arguments of ``api.compress``."""

    kv: torch.Tensor
    score: torch.Tensor
    ape: torch.Tensor
    weight: torch.Tensor
    eps: float
    cos_sin: torch.Tensor
    request_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    cache: torch.Tensor
    cache_format: str
    scale_rounding: str
    state_cache: torch.Tensor | None
    state_table: torch.Tensor | None

    @property
    def layout(self) -> CacheFormat:
        return as_format(self.cache_format, self.weight.shape[0])

    @property
    def ratio(self) -> int:
        """Tokens per group."""
        return self.ape.shape[0]

    @property
    def overlaps(self) -> bool:
        """Whether a row also depends on the preceding group."""
        return self.ape.shape[1] > self.weight.shape[0]


def compress(params: CompressParams) -> None:
    slots, positions = params.slot_mapping, params.positions.long()
    finishes = _known(params) & ((positions + 1) % params.ratio == 0) & in_cache(slots, params.cache)
    (tokens,) = torch.where(finishes)
    values, scores = _gather(params, tokens)
    rows = (values * torch.softmax(scores, dim=1)).sum(dim=1)
    rows = rows * torch.rsqrt(rows.square().mean(dim=-1, keepdim=True) + params.eps) * params.weight.float()
    rows = rotate_tail(rows, params.cos_sin, positions[tokens] + 1 - params.ratio)
    layout = params.layout
    planes = encode_rows(layout, rows, params.scale_rounding)
    write_slots(params.cache, slots[tokens].long(), planes, layout)
    _save_state(params)


def _known(params: CompressParams) -> torch.Tensor:
    """Whether each token is not padding."""
    known = (params.request_ids >= 0) & (params.positions >= 0)
    return known if params.state_table is None else known & (params.request_ids < params.state_table.shape[0])


def _gather(params: CompressParams, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scores, float32 [n, rows, head_dim], of the members of the groups that ``tokens`` [n] complete."""
    head_dim, ratio = params.weight.shape[0], params.ratio
    rows = ratio * (1 + params.overlaps)
    back = torch.arange(rows - 1, -1, -1, device=tokens.device)
    token = tokens[:, None] - back
    position = params.positions[tokens].long()[:, None] - back
    request = params.request_ids[tokens].long()[:, None]
    is_new = (token >= 0) & (params.request_ids[token.clamp_min(0)] == request)
    token = token.where(is_new, 0)
    values = params.kv[token].float()  # [n, rows, width]
    scores = params.score[token].float() + params.ape[position % ratio]
    visible = is_new & (position >= 0)
    if params.state_cache is not None and params.state_table is not None:
        page, offset, found = _locate_states(params.state_cache, params.state_table, request, position)
        old_values, old_scores = params.state_cache[page, offset].chunk(2, dim=-1)
        values = torch.where(is_new[..., None], values, old_values)
        scores = torch.where(is_new[..., None], scores, old_scores)
        visible = (is_new | found) & (position >= 0)
    values = values.masked_fill(~visible[..., None], 0.0)
    scores = scores.masked_fill(~visible[..., None], -torch.inf)
    if not params.overlaps:
        return values, scores
    before, own = slice(0, head_dim), slice(head_dim, None)
    return (
        torch.cat((values[:, :ratio, before], values[:, ratio:, own]), dim=1),
        torch.cat((scores[:, :ratio, before], scores[:, ratio:, own]), dim=1),
    )


def _locate_states(
    cache: torch.Tensor, table: torch.Tensor, request: torch.Tensor, position: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Page and offset of positions in the state cache (0 and 0 if a position is not in it), and whether it is."""
    num_pages, page_size = cache.shape[:2]
    requests, columns = table.shape
    page = table[request.clamp(0, requests - 1), position // page_size % columns].long()
    found = (request >= 0) & (request < requests) & (position < 2**31) & (page >= 0) & (page < num_pages)
    return page.where(found, 0), (position % page_size).where(found, 0), found


def _save_state(params: CompressParams) -> None:
    """Save the last tokens of each request, up to the capacity of its pages."""
    if params.state_cache is None or params.state_table is None:
        return
    request, position = params.request_ids.long(), params.positions.long()
    room = params.state_table.shape[1] * params.state_cache.shape[1]
    page, offset, found = _locate_states(params.state_cache, params.state_table, request, position)
    later = torch.full_like(request, -1)
    later[: max(len(request) - room, 0)] = request[room:]
    saved = found & _known(params) & (later != request)
    state = torch.cat((params.kv.float(), params.score.float() + params.ape[position % params.ratio]), dim=-1)
    params.state_cache[page[saved], offset[saved]] = state[saved]
