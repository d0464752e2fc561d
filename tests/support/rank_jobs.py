"""Functions that tests run on each of several ranks. Every rank draws the whole problem from the same seed."""

from __future__ import annotations

import contextlib
import functools
import time
import warnings
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from support import shared_files

from flashlatte import kv_cache
from flashlatte.distributed import ContextParallel, Sharding, direct, failing_together
from flashlatte.ops.merge_states import merge_states
from flashlatte.runtime import gradients

DIM, VALUE = 24, 16


@dataclass(frozen=True)
class Step:
    """A decode step without sharding: b requests, their keys in order, and queries."""

    lengths: tuple[int, ...]
    heads: int
    queries: int = 1
    dtype: torch.dtype = torch.float32
    cache_format: str | None = None
    seed: int = 0
    device: str = "cpu"

    @property
    def dims(self) -> tuple[int, int]:
        """Widths of a key and of a value: small if the format allows it."""
        return (DIM, VALUE) if self.cache_format is None and self.device == "cpu" else (576, 512)

    @property
    def scale(self) -> float:
        return 1.5 / self.dims[0] ** 0.5

    @functools.cached_property
    def q(self) -> torch.Tensor:
        return self._draw(0, len(self.lengths), self.queries, self.heads, self.dims[0])

    @functools.cached_property
    def keys(self) -> torch.Tensor:
        """[b, longest, d], with ``longest`` slightly larger than the length of any request."""
        return self._draw(1, len(self.lengths), max(self.lengths, default=0) + 1, self.dims[0])

    def _draw(self, stream: int, *shape: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(2 * self.seed + stream)
        return torch.randn(*shape, generator=generator).to(self.device, self.dtype)


@dataclass(frozen=True)
class Shard:
    """One rank's pages of a step, with NaN in slots without a key."""

    cache: torch.Tensor
    block_table: torch.Tensor
    cache_seqlens: torch.Tensor
    page_tokens: int


def shard(step: Step, sharding: Sharding, page_size: int) -> Shard:
    """Write a step's keys to pages by slots of the whole cache, as a server would."""
    page_tokens = page_size * sharding.size
    batch, longest = step.keys.shape[:2]
    columns = longest // page_tokens + 1
    table = torch.randperm(batch * columns + 3, generator=torch.Generator().manual_seed(9))[: batch * columns]
    table = table.view(batch, columns).to(step.device, torch.int32)
    token, lengths = torch.arange(longest, device=step.device), torch.tensor(step.lengths, device=step.device)
    slots = table[:, token // page_tokens] * page_tokens + token % page_tokens
    slots = torch.where(token < lengths.unsqueeze(1), slots, -1)

    layout = step.cache_format or kv_cache.infer_format(step.keys)
    pages = batch * columns + 3
    cache = kv_cache.allocate(layout, pages, page_size, device=step.device)
    cache.view(torch.uint8).fill_(0xFF)  # NaN in every format
    kv_cache.write(  # type: ignore[attr-defined]
        cache, sharding.local_slots(slots, page_tokens).flatten(), step.keys.flatten(0, 1), cache_format=layout
    )
    return Shard(cache, table, lengths.to(torch.int32), page_tokens)


def own_heads(x: torch.Tensor, dim: int, context: ContextParallel) -> torch.Tensor:
    if context.all_heads:
        return x
    return x.chunk(context.sharding.size, dim)[context.sharding.rank]


@functools.lru_cache
def context_parallel(interleave: int, form: str | None, all_heads: bool) -> ContextParallel:
    # On GPUs ranks compile kernels, at different speeds.
    timeout = timedelta(seconds=120 if torch.cuda.is_available() else 20)
    return ContextParallel(interleave=interleave, form=form, all_heads=all_heads, timeout=timeout)


def decode(
    step: Step,
    *,
    interleave: int,
    form: str | None,
    all_heads: bool = False,
    page_size: int = 8,
    causal: bool = True,
    sink: bool = False,
    rope: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode twice, and check that the results are bitwise equal.

    ``rope``: the number of columns of the queries that the second call passes in another tensor.
    """
    context = context_parallel(interleave, form, all_heads)
    mine = shard(step, context.sharding, page_size)
    plan = context.plan(
        mine.block_table,
        mine.cache_seqlens,
        page_tokens=mine.page_tokens,
        queries=step.queries,
        causal=causal,
        cache_format=step.cache_format,
    )
    q, sinks = own_heads(step.q, 2, context), own_heads(sinks_of(step), 0, context)
    options = {"head_dim_v": step.dims[1], "softmax_scale": step.scale, "attn_sink": sinks if sink else None}
    with shared_files.installed() if step.device == "cpu" and form == "direct" else contextlib.nullcontext():
        results = [context.decode(**parts, k_cache=mine.cache, plan=plan, **options) for parts in _forms(q, rope)]
    same_bits(*results)
    return results[0]


def _forms(q: torch.Tensor, rope: int) -> list[dict[str, torch.Tensor]]:
    """Arguments of two calls with queries q; the second has the last ``rope`` columns in a tensor of other strides."""
    if not rope:
        return [{"q": q}] * 2
    width = q.shape[-1] - rope
    apart = torch.nn.functional.pad(q[..., width:], (3, 2), value=torch.nan)[..., 3 : 3 + rope]
    return [{"q": q}, {"q": q[..., :width].clone(), "q_rope": apart}]


def decode_before(step: Step, other: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """``step`` in form "direct", with rank 0 still merging when the other ranks have started ``other``."""

    def late(*partials: Any) -> Any:
        if step.device == "cpu":
            time.sleep(0.2)
        else:
            torch.cuda._sleep(100_000_000)  # cycles, of the stream
        return merge_states(*partials)

    calls = [functools.partial(decode, each, interleave=1, form="direct") for each in (step, other)]
    for call in calls:  # At their first call of a shape the ranks wait for each other.
        call()
    with mock.patch.object(direct, "merge_states", late) if dist.get_rank() == 0 else contextlib.nullcontext():
        result, _ = (call() for call in calls)
    return result


def out_of_reach(step: Step) -> None:
    context = ContextParallel(form="direct")
    mine = shard(step, context.sharding, 8)
    plan = context.plan(mine.block_table, mine.cache_seqlens, page_tokens=mine.page_tokens)
    context.decode(own_heads(step.q, 2, context), mine.cache, plan, head_dim_v=step.dims[1])


def sparse_decode(
    step: Step,
    topk: int,
    *,
    interleave: int,
    form: str | None,
    all_heads: bool = False,
    page_size: int = 8,
    rope: int = 0,
) -> Any:
    """Logits of every key, the top k of all ranks, and attention to them; the selection is returned too."""
    context = context_parallel(interleave, form, all_heads)
    mine = shard(step, context.sharding, page_size)
    plan = context.plan(mine.block_table, mine.cache_seqlens, page_tokens=mine.page_tokens, queries=step.queries)
    width = max(mine.block_table.shape[1] * page_size, 1)
    positions = context.sharding.global_positions(torch.arange(width, device=step.device))
    local = index_logits(step)[..., positions.clamp_max(max(step.lengths))].flatten(0, 1)
    chosen = context.topk(local, topk, plan.query_lens.flatten()).view(len(step.lengths), step.queries, topk)
    slots, counts = context.slots(chosen, plan)
    q = own_heads(step.q, 2, context)
    selected = {"k_cache": mine.cache, "slots": slots, "topk_length": counts}
    options = {"head_dim_v": step.dims[1], "softmax_scale": step.scale}
    results = [context.sparse_decode(**parts, **selected, **options) for parts in _forms(q, rope)]
    same_bits(*results)
    return chosen, *results[0]


def index_logits(step: Step) -> torch.Tensor:
    """[b, queries, longest], with many equal logits and some NaN."""
    generator = torch.Generator().manual_seed(step.seed + 77)
    shape = (len(step.lengths), step.queries, max(step.lengths, default=0) + 1)
    logits = torch.randint(0, 12, shape, generator=generator).float()
    return logits.masked_fill(logits == 11, torch.nan).to(step.device)


def expected(
    step: Step, *, causal: bool = True, sink: bool = False, chosen: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The step without sharding: out [b, s_q, h, v] and lse [b, h, s_q], in float64."""
    lengths = torch.tensor(step.lengths, device=step.device).view(-1, 1, 1)
    key, query = (torch.arange(count, device=step.device) for count in (step.keys.shape[1], step.queries))
    last = lengths - step.queries + query.view(1, -1, 1) if causal else lengths - 1
    seen = (key <= last).expand(-1, step.queries, -1)
    if chosen is not None:
        seen = (chosen.unsqueeze(-1) == key).any(dim=2)
    scores = torch.einsum("bshd,bkd->bhsk", step.q.double(), step.keys.double()) * step.scale
    scores = scores.masked_fill(~seen.unsqueeze(1), -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp().nan_to_num(0.0)
    out = torch.einsum("bhsk,bkv->bshv", weights, step.keys.double()[..., : step.dims[1]])
    if sink:
        out = out * torch.sigmoid(lse.transpose(1, 2) - sinks_of(step)).unsqueeze(-1)
    return out, lse


def sinks_of(step: Step) -> torch.Tensor:
    return torch.linspace(-1, 2, step.heads, device=step.device)


def same_bits(first: tuple[torch.Tensor, ...], second: tuple[torch.Tensor, ...]) -> None:
    for one, other in zip(first, second, strict=True):
        one, other = (x.clone(memory_format=torch.contiguous_format).flatten() for x in (one, other))
        assert one.view(torch.uint8).equal(other.view(torch.uint8))


def call_with(changes: dict[int, dict[str, Any]], **common: Any) -> None:
    """``ContextParallel`` whose arguments differ by rank."""
    ContextParallel(timeout=timedelta(seconds=2), **common | changes.get(dist.get_rank(), {}))


def decode_heads(heads_by_rank: list[int]) -> None:
    """A decode whose number of heads differs by rank."""
    step = Step((5, 9), heads_by_rank[dist.get_rank()] * len(heads_by_rank))
    decode(step, interleave=1, form=None)


def decode_with_gradient() -> tuple[bool, str]:
    """Whether the output of queries that require a gradient requires one, and the warning."""
    step = Step((5, 9, 7), 2 * dist.get_world_size())
    step.q.requires_grad_()
    gradients._warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        out, _ = decode(step, interleave=1, form=None)
    return out.requires_grad, str(caught[0].message)


def decode_with_ropes(ropes_by_rank: list[int]) -> None:
    """A decode whose part of the queries in another tensor differs by rank."""
    step = Step((5, 9, 3), len(ropes_by_rank))
    decode(step, interleave=1, form=None, rope=ropes_by_rank[dist.get_rank()])


def only_rank_0_makes_one() -> None:
    if dist.get_rank() == 0:
        ContextParallel(timeout=timedelta(seconds=0.5))


def the_others_make_one() -> None:
    if dist.get_rank() != 0:
        ContextParallel()


def fail_on(rank: int) -> None:
    """One rank fails, and the others wait for it in a collective."""
    with failing_together():
        if dist.get_rank() == rank:
            raise ValueError("cache of this rank is full")
        dist.all_reduce(torch.ones(1))
