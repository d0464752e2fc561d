"""``ContextParallel``: decode with keys sharded over the ranks of a process group."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from flashlatte.distributed import merge
from flashlatte.distributed.agreement import Agreement, as_group
from flashlatte.distributed.direct import MAX_BYTES, Direct
from flashlatte.distributed.peer_memory import PeerMemory
from flashlatte.distributed.shard_plan import ShardPlan, plan_shard
from flashlatte.distributed.topk import global_topk
from flashlatte.kernels.softmax import sink_weight
from flashlatte.kv_cache.codec import as_cache
from flashlatte.kv_cache.formats import CacheFormat
from flashlatte.kv_cache.sharding import as_sharding
from flashlatte.ops.dense_decode import dense_decode
from flashlatte.ops.index_convert import index_convert
from flashlatte.ops.sparse_decode import sparse_decode
from flashlatte.runtime import checks, gradients, query_parts

FORMS = ("direct", *merge.FORMS)

# ``attend(queries, rope, out, lse)``: attention of queries [T, h, d] to this rank's keys, into out and lse. If ``rope``
# is given, ``queries`` are the other columns.
_Attend = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor], None]


class ContextParallel:
    """Decode context parallelism: each rank stores a shard of every request's keys, and attends to it with all heads.

    The ranks' partial outputs are merged by lse (arXiv:2501.01005, §2.2). Every method but ``plan`` and ``slots`` is a
    collective operation: all ranks of the group must call it, in the same order. Results are bitwise reproducible, and
    have no gradients.

    Args:
        group: a process group of torch.distributed, NCCL for GPUs; all ranks if None.
        interleave: consecutive tokens on one rank: token t is on rank (t // interleave) % size.
        form: how partial outputs are merged. "direct" writes queries to all ranks and reads partial outputs over
            NVLink; it needs GPUs of one host with peer access. "all_to_all" sends each rank its heads, out and lse in
            one buffer. "reduce_scatter" and "all_reduce" gather lse and sum corrected outputs in float32. None chooses
            "direct" if possible, else "all_to_all", which sends the fewest bytes, or "all_reduce" if the number of
            heads is not divisible.
        all_heads: every rank passes the queries of all heads and receives the results of all heads. If False, each
            rank passes and receives its own heads, equally many on each rank.
        timeout: how long a rank waits for the others at the first call with new shapes.

    Raises:
        TypeError, ValueError: a wrong argument, or one that differs between ranks.
        RuntimeError: a rank does not create the object within ``timeout``.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        interleave: int = 1,
        form: str | None = None,
        all_heads: bool = False,
        timeout: timedelta = timedelta(seconds=60),
    ) -> None:
        group = as_group(group)
        self.group, self.form = group, form
        self._agreement = Agreement(group, timeout)
        self._peers: dict[torch.device, PeerMemory | str] = {}
        # Compare before validation: if one rank raises alone, the others wait.
        arguments = {"size": group.size(), "interleave": interleave, "form": form, "all_heads": all_heads}
        self._agreement.check("ContextParallel", {name: str(value) for name, value in arguments.items()})
        if form is not None:
            checks.choice("form", form, FORMS)
        self.all_heads = checks.flag("all_heads", all_heads)
        self.sharding = as_sharding((group.rank(), group.size(), interleave))

    def plan(
        self,
        block_table: torch.Tensor,
        cache_seqlens: torch.Tensor,
        *,
        page_tokens: int,
        page_size: int | None = None,
        queries: int = 1,
        causal: bool = True,
        cache_format: str | None = None,
    ) -> ShardPlan:
        """Plan a step on this rank, for all layers. It runs on the device and may be captured in a CUDA graph.

        Args:
            block_table: int32 or int64 [b, max_pages], the same on all ranks.
            cache_seqlens: int32 or int64 [b], keys of each request over all ranks, including the new ones.
            page_tokens: tokens in a page over all ranks, a multiple of size · interleave.
            page_size: tokens in a page of this rank's cache, page_tokens / size if None; a divisor of that if a page
                consists of several consecutive cache pages.
            queries: new tokens of each request.
            causal: query j attends to keys 0 to cache_seqlens - queries + j; if False, to all keys.
            cache_format: name of the cache's format, required for formats with scales.

        Raises:
            TypeError, ValueError: tensors of a wrong dtype, shape or device; a page size that does not divide.
        """
        return plan_shard(
            self.sharding,
            block_table,
            cache_seqlens,
            page_tokens=page_tokens,
            page_size=page_size,
            queries=queries,
            causal=causal,
            cache_format=cache_format,
        )

    def decode(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        plan: ShardPlan,
        *,
        q_rope: torch.Tensor | None = None,
        cache_format: str | CacheFormat | None = None,
        head_dim_v: int = 512,
        softmax_scale: float | None = None,
        k_scale: float | torch.Tensor | None = None,
        attn_sink: torch.Tensor | None = None,
        backend: str | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``dense_decode`` over the keys of all ranks.

        Args:
            q: [b, queries, h, d], queries of this rank's heads (of all heads with ``all_heads``). Or their first
                columns, if the others are in ``q_rope``.
            k_cache: [pages, page_size, 1, width], this rank's cache in any format of ``dense_decode`` or
                ``sparse_decode``.
            plan: plan of the step.
            q_rope: the last columns of the queries, [b, queries, h, d - width of q], in q's dtype, last stride 1; None:
                ``q`` has all d. All ranks must pass parts of the same widths. Both parts are copied together if ranks
                exchange queries, and passed on otherwise.
            cache_format: inferred from k_cache if None.
            head_dim_v, softmax_scale, k_scale, backend: as for ``dense_decode``.
            attn_sink: float32 [h]; out is scaled by e^lse / (e^lse + e^sink).

        Returns:
            out [b, queries, h, head_dim_v] in q's dtype, and lse, natural logarithm, float32 [b, h, queries], without
            the sink. Without any key, out is 0 and lse -inf.

        Raises:
            TypeError, ValueError: an argument of the wrong type, dtype, shape or device, or that differ between ranks;
                a plan for another cache or other queries.
            RuntimeError: a rank does not make the first call with these shapes within the timeout.
        """
        pages, layout = as_cache(k_cache, cache_format, "k_cache")
        self._check_plan(q, pages, plan)
        if not layout.plain and plan.slots is None:
            raise ValueError(f"plan must be made with cache_format {layout.name!r} for this k_cache, got one without")
        if k_scale is not None and not layout.takes_scale:
            raise ValueError(f"k_scale belongs to cache format fp8, got {layout.name}")
        common: dict[str, Any] = {"head_dim_v": head_dim_v, "softmax_scale": softmax_scale, "backend": backend}

        def attend(queries: torch.Tensor, rope: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor) -> None:
            if layout.plain:
                rows = (plan.row_lens.shape[0], plan.row_queries)
                of_rows = _by_rows(rope, out, lse, rows)
                queries = queries.unflatten(0, rows)
                dense_decode(queries, pages, plan.rows_table, plan.row_lens, k_scale=k_scale, **of_rows, **common)
            elif plan.slots is not None:
                rows, selection = plan.slots.shape[:2], {"cache_format": layout, "topk_length": plan.query_lens}
                queries, of_rows = queries.unflatten(0, rows), _by_rows(rope, out, lse, rows)
                sparse_decode(queries, pages, plan.slots, **selection, **of_rows, **common)

        return self._merged("decode", attend, q, q_rope, layout, head_dim_v, softmax_scale, attn_sink)

    def slots(self, positions: torch.Tensor, plan: ShardPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """The slots of the selected tokens that are on this rank, for ``sparse_decode``.

        Args:
            positions: int32 or int64 [b, queries, topk], token positions in the query's request; below 0 for none.
            plan: plan of the step.

        Returns:
            int32 [b, queries, topk], this rank's slots, then -1, and their number, int32 [b, queries].

        Raises:
            TypeError, ValueError: positions of another dtype or device, or that do not match the plan's queries.
        """
        shape = (plan.requests, plan.queries, "topk")
        checks.tensor("positions", positions, shape, checks.INDEX_DTYPES, plan.block_table.device)
        slots, counts = index_convert(
            positions.flatten(0, 1),
            plan.block_table,
            plan.page_size,
            next_n=plan.queries,
            sharding=self.sharding,
            compact=True,
            return_counts=True,
        )
        return slots.view(positions.shape), counts.view(positions.shape[:2])  # type: ignore[union-attr]

    def sparse_decode(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        slots: torch.Tensor,
        topk_length: torch.Tensor | None = None,
        *,
        q_rope: torch.Tensor | None = None,
        cache_format: str | CacheFormat | None = None,
        head_dim_v: int = 512,
        softmax_scale: float | None = None,
        attn_sink: torch.Tensor | None = None,
        backend: str | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``sparse_decode`` over the selected tokens of all ranks.

        Args:
            slots, topk_length: int32 or int64 [b, queries, topk] and [b, queries], as ``slots`` returns them.
            q, k_cache, q_rope, cache_format, head_dim_v, softmax_scale, attn_sink, backend: as for ``decode``.

        Returns:
            out and lse, as ``decode``.

        Raises:
            TypeError, ValueError, RuntimeError: as ``decode``.
        """
        pages, layout = as_cache(k_cache, cache_format, "k_cache")

        def attend(queries: torch.Tensor, rope: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor) -> None:
            rows = q.shape[:2]
            sparse_decode(
                queries.unflatten(0, rows),
                pages,
                slots,
                cache_format=layout,
                topk_length=topk_length,
                softmax_scale=softmax_scale,
                head_dim_v=head_dim_v,
                backend=backend,
                **_by_rows(rope, out, lse, rows),
            )

        return self._merged("sparse_decode", attend, q, q_rope, layout, head_dim_v, softmax_scale, attn_sink)

    def topk(
        self, logits: torch.Tensor, k: int, local_lengths: torch.Tensor, *, backend: str | None = None
    ) -> torch.Tensor:
        """Exact ``topk`` over the keys of all ranks.

        Args:
            logits: [rows, width], float32 or bf16, of this rank's keys and the same queries on every rank.
            k: 1 to 4096.
            local_lengths: int32 or int64 [rows], number of this rank's keys that a row may select from
                (``plan.query_lens.flatten()``).
            backend: backend of ``topk``.

        Returns:
            int32 [rows, k], token positions in ascending order, then -1; the same on every rank.

        Raises:
            TypeError, ValueError: arguments of a wrong type, dtype or shape, or that differ between ranks.
            RuntimeError: a rank does not make the first call with these shapes within the timeout.
        """
        checks.tensor("logits", logits, ("rows", "width"), (torch.float32, torch.bfloat16))
        self._agreement.check("topk", {"rows": logits.shape[0], "k": k, "dtype": logits.dtype})
        return global_topk(logits.detach(), k, local_lengths, self.sharding, self.group, backend)

    def _merged(
        self,
        call: str,
        attend: _Attend,
        q: torch.Tensor,
        q_rope: torch.Tensor | None,
        layout: CacheFormat,
        head_dim_v: int,
        softmax_scale: float | None,
        attn_sink: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run ``attend`` for all heads on this rank's keys, and merge the ranks' partial outputs."""
        checks.tensor("q", q, ("b", "queries", "h", "d"), checks.FLOAT_DTYPES, may_be_empty=2)
        checks.query_width(q, q_rope)
        batch, queries, heads = q.shape[:3]
        if attn_sink is not None:
            checks.tensor("attn_sink", attn_sink, (heads,), (torch.float32,), q.device, unit_last_stride=False)
        facts = {
            "q": tuple(q.shape),
            "q_rope": None if q_rope is None else tuple(q_rope.shape),
            "dtype": q.dtype,
            "cache_format": layout.name,
        }
        facts |= {"head_dim_v": checks.positive_int("head_dim_v", head_dim_v), "softmax_scale": softmax_scale}
        self._agreement.check(call, facts)
        gradients.warn_if_dropped(f"ContextParallel.{call}", q, q_rope, attn_sink)
        with torch.no_grad():
            out, lse = self._attend_and_merge(
                attend, q.flatten(0, 1), None if q_rope is None else q_rope.flatten(0, 1), head_dim_v
            )
            if attn_sink is not None:
                out = (out * sink_weight(lse, attn_sink).unsqueeze(-1)).to(out.dtype)
        return out.unflatten(0, (batch, queries)), lse.unflatten(0, (batch, queries)).mT

    def _attend_and_merge(
        self, attend: _Attend, q: torch.Tensor, q_rope: torch.Tensor | None, head_dim_v: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The result for queries [T, h, d] or their parts: out [T, h, head_dim_v], and lse [T, h] without the sink."""
        size, (tokens, heads, _), dim = self.sharding.size, q.shape, query_parts.width(q, q_rope)
        total = heads if self.all_heads else heads * size
        form = self._form(total, tokens * total * (dim + head_dim_v + 2) * q.element_size(), q.device)
        if size == 1 or tokens == 0:
            out, lse = q.new_empty(tokens, heads, head_dim_v), q.new_empty(tokens, heads, dtype=torch.float32)
            attend(q, q_rope, out, lse)
            return out, lse
        if not self.all_heads:
            q, q_rope = query_parts.join(q, q_rope), None
        if form == "direct":
            memory = self._peers[q.device]
            assert isinstance(memory, PeerMemory)
            direct = Direct.take(memory, q, total, head_dim_v, self.all_heads)
            q, partial = direct.gather(q), direct.partial
            attend(q, q_rope, partial.out, partial.lse)
            return direct.merge()
        if not self.all_heads:
            q = merge.gather_heads(q, self.group)
        partial = merge.allocate(tokens, total, head_dim_v, q.dtype, q.device, form)
        attend(q, q_rope, partial.out, partial.lse)
        merged = merge.merge_all_heads if self.all_heads else merge.merge
        return merged(partial, self.group, form)

    def _form(self, heads: int, bytes_per_rank: int, device: torch.device) -> str:
        """The form of merging for a call with ``heads`` heads over all ranks."""
        size = self.sharding.size
        if size > 1 and self.form in (None, "direct"):
            if device not in self._peers:
                self._peers[device] = PeerMemory.connect(self.group, device, self._agreement)
            peers = self._peers[device]
            if self.form is None and isinstance(peers, PeerMemory) and bytes_per_rank <= MAX_BYTES:
                return "direct"
            if self.form == "direct" and isinstance(peers, str):
                raise ValueError(f"form 'direct' is not possible: {peers}")
        form = self.form or ("all_reduce" if heads % size else "all_to_all")
        if heads % size and form not in ("all_reduce", "direct"):
            raise ValueError(f"q must have a multiple of {size} heads (the number of ranks) for {form!r}, got {heads}")
        return form

    def _check_plan(self, q: torch.Tensor, pages: torch.Tensor, plan: ShardPlan) -> None:
        """Raise ValueError for a plan of another cache, rank or batch, which kernels cannot detect."""
        checks.instance("plan", plan, ShardPlan)
        if plan.sharding != self.sharding:
            raise ValueError(f"plan must be made for {self.sharding}, got one for {plan.sharding}")
        if plan.page_size != pages.shape[1]:
            raise ValueError(
                f"k_cache must have the plan's pages of {plan.page_size} tokens, got pages of {pages.shape[1]}"
            )
        if isinstance(q, torch.Tensor) and q.shape[:2] != (plan.requests, plan.queries):
            raise ValueError(
                f"q must have the plan's {plan.requests} requests of {plan.queries} queries, got shape {list(q.shape)}"
            )


def _by_rows(rope: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor, rows: tuple[int, ...]) -> dict[str, Any]:
    """rope and out [T, H, d] and lse [T, H] as arguments of decode operations, for ``rows`` = (requests, queries)."""
    rope = None if rope is None else rope.unflatten(0, rows)
    return {"q_rope": rope, "out": out.unflatten(0, rows), "lse": lse.unflatten(0, rows).mT}
