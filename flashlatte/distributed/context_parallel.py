"""``ContextParallel``: decode over keys that are spread over the ranks of a process group."""

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
from flashlatte.distributed.plan import ShardPlan, plan_shard
from flashlatte.distributed.topk import global_topk
from flashlatte.kernels.softmax import sink_weight
from flashlatte.kv_cache.codec import as_cache
from flashlatte.kv_cache.formats import CacheFormat
from flashlatte.kv_cache.sharding import as_sharding
from flashlatte.ops.dense_decode import dense_decode
from flashlatte.ops.index_convert import index_convert
from flashlatte.ops.sparse_decode import sparse_decode
from flashlatte.runtime import checks

FORMS = ("direct", *merge.FORMS)


class ContextParallel:
    """Decode context parallelism: each rank holds a part of every request's keys, and attends to it with all heads.

    The ranks' results are merged by their lse (arXiv:2501.01005, §2.2). Every method but ``plan`` and ``slots`` is a
    collective: all ranks of the group call it, in the same order. Results are bitwise the same from run to run.

    Args:
        group: a process group of torch.distributed, NCCL for GPUs; all ranks if None.
        interleave: tokens in a row that lie on one rank: token t is on rank (t // interleave) % size.
        form: how results are merged. "direct" writes queries to all ranks and reads results where they lie: GPUs of one
            host that reach each other's memory. "all_to_all" sends each rank its heads, out and lse in one buffer;
            "reduce_scatter" and "all_reduce" gather lse and sum corrected outputs in float32. None is "direct" where
            that can be, else "all_to_all", which sends the fewest bytes, or where the heads cannot be divided
            "all_reduce".
        all_heads: every rank passes queries of all heads and gets the results of all heads. If False, each has its
            own, as many as every other: its shard of a layer whose heads are divided.
        timeout: how long a rank waits for the others to come to a call of new shapes.

    Raises:
        TypeError, ValueError: a wrong argument, or one that is not the same on all ranks.
        RuntimeError: a rank that does not make the object within ``timeout``.
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
        # Compared before anything is checked: a rank that raises alone leaves the others waiting.
        asked = {"size": group.size(), "interleave": interleave, "form": form, "all_heads": all_heads}
        self._agreement.check("ContextParallel", {name: str(value) for name, value in asked.items()})
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
        """What this rank attends to in a step, for all layers. It runs on the device, also inside a CUDA graph.

        Args:
            block_table: int32 or int64 [b, max_pages], the same on all ranks.
            cache_seqlens: int32 or int64 [b], keys of each request on all ranks together, the new ones among them.
            page_tokens: tokens of a request in a page, on all ranks together: a multiple of size · interleave.
            page_size: tokens in a page of this rank's cache, page_tokens / size if None; a divisor of it where a page
                is several of the cache's in a row.
            queries: new tokens of each request.
            causal: query j sees keys 0 to cache_seqlens - queries + j; if False, all.
            cache_format: of the cache, by name, needed for those with scales.

        Raises:
            TypeError, ValueError: tensors of a wrong dtype, shape or device; pages that cannot be divided so.
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
        cache_format: str | CacheFormat | None = None,
        head_dim_v: int = 512,
        softmax_scale: float | None = None,
        k_scale: float | torch.Tensor | None = None,
        attn_sink: torch.Tensor | None = None,
        backend: str | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of a few query tokens a request over all keys of all ranks; ``dense_decode`` on one.

        Args:
            q: [b, queries, h, d], queries of this rank's heads (of all heads with ``all_heads``).
            k_cache: [pages, page_size, 1, width], this rank's, in any format that ``dense_decode`` or
                ``sparse_decode`` reads.
            plan: of the step.
            cache_format: inferred from k_cache if None.
            head_dim_v, softmax_scale, k_scale, backend: as for ``dense_decode``.
            attn_sink: float32 [h], of these heads: out is scaled by e^lse / (e^lse + e^sink).

        Returns:
            out [b, queries, h, head_dim_v] in q's dtype, and lse, natural logarithm, float32 [b, h, queries], without
            the sink; -inf, and out 0, where no rank has a key.

        Raises:
            TypeError, ValueError: arguments of a wrong type, dtype, shape or device, or that are not the same on all
                ranks; a plan for another cache or other queries.
            RuntimeError: a rank that does not come to the call, the first time that it has these shapes.
        """
        pages, layout = as_cache(k_cache, cache_format, "k_cache")
        self._check_plan(q, pages, plan)
        if not layout.plain and plan.slots is None:
            raise ValueError(f"plan must be made with cache_format {layout.name!r} for such a k_cache, got one without")
        if k_scale is not None and not layout.takes_scale:
            raise ValueError(f"k_scale belongs to cache format fp8, got {layout.name}")
        common: dict[str, Any] = {"head_dim_v": head_dim_v, "softmax_scale": softmax_scale, "backend": backend}

        def attend(queries: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
            if layout.plain:
                rows = (plan.row_lens.shape[0], plan.row_queries)
                queries, outputs = queries.unflatten(0, rows), _outputs(out, lse, rows)
                dense_decode(queries, pages, plan.rows_table, plan.row_lens, k_scale=k_scale, **outputs, **common)
            elif plan.slots is not None:
                rows, selection = plan.slots.shape[:2], {"cache_format": layout, "topk_length": plan.query_lens}
                queries, outputs = queries.unflatten(0, rows), _outputs(out, lse, rows)
                sparse_decode(queries, pages, plan.slots, **selection, **outputs, **common)

        return self._merged("decode", attend, q, layout, head_dim_v, softmax_scale, attn_sink)

    def slots(self, positions: torch.Tensor, plan: ShardPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's slots among the tokens that each query selected, for ``sparse_decode``.

        Args:
            positions: int32 or int64 [b, queries, topk], tokens of the query's request; below 0 for none.
            plan: of the step.

        Returns:
            int32 [b, queries, topk], this rank's first and then -1, and how many are, int32 [b, queries].

        Raises:
            TypeError, ValueError: positions of another dtype or device, or that are not of the plan's queries.
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
        cache_format: str | CacheFormat | None = None,
        head_dim_v: int = 512,
        softmax_scale: float | None = None,
        attn_sink: torch.Tensor | None = None,
        backend: str | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention over the tokens that each query selected, each rank over those that it holds.

        Args:
            slots, topk_length: int32 or int64 [b, queries, topk] and [b, queries], as ``slots`` returns them.
            q, k_cache, cache_format, head_dim_v, softmax_scale, attn_sink, backend: as for ``decode``.

        Returns:
            out and lse, as ``decode``.

        Raises:
            TypeError, ValueError, RuntimeError: as ``decode``.
        """
        pages, layout = as_cache(k_cache, cache_format, "k_cache")

        def attend(queries: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
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
                **_outputs(out, lse, rows),
            )

        return self._merged("sparse_decode", attend, q, layout, head_dim_v, softmax_scale, attn_sink)

    def topk(
        self, logits: torch.Tensor, k: int, local_lengths: torch.Tensor, *, backend: str | None = None
    ) -> torch.Tensor:
        """The k tokens of the highest logits over the keys of all ranks, exactly as ``topk`` chooses among all.

        Args:
            logits: [rows, width], float32 or bf16: of this rank's keys, the same queries on every rank.
            k: 1 to 4096.
            local_lengths: int32 or int64 [rows], this rank's keys that the row may choose from
                (``plan.query_lens.flatten()``).
            backend: of ``topk``.

        Returns:
            int32 [rows, k], tokens of the request in ascending order, then -1; the same on every rank.

        Raises:
            TypeError, ValueError: arguments of a wrong type, dtype or shape, or that are not the same on all ranks.
            RuntimeError: a rank that does not come to the call, the first time that it has these shapes.
        """
        checks.tensor("logits", logits, ("rows", "width"), (torch.float32, torch.bfloat16))
        self._agreement.check("topk", {"rows": logits.shape[0], "k": k, "dtype": logits.dtype})
        return global_topk(logits, k, local_lengths, self.sharding, self.group, backend)

    def _merged(
        self,
        call: str,
        attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None],
        q: torch.Tensor,
        layout: CacheFormat,
        head_dim_v: int,
        softmax_scale: float | None,
        attn_sink: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Merge what ``attend`` writes into out [T, H, d] and lse [T, H] for all heads' queries [T, H, dim]."""
        checks.tensor("q", q, ("b", "queries", "h", "d"), checks.FLOAT_DTYPES, may_be_empty=2)
        batch, queries, heads, dim = q.shape
        if attn_sink is not None:
            checks.tensor("attn_sink", attn_sink, (heads,), (torch.float32,), q.device, unit_last_stride=False)
        size, tokens = self.sharding.size, batch * queries
        facts = {"q": (batch, queries, heads, dim), "dtype": q.dtype, "cache_format": layout.name}
        facts |= {"head_dim_v": checks.positive_int("head_dim_v", head_dim_v), "softmax_scale": softmax_scale}
        total = heads if self.all_heads else heads * size
        self._agreement.check(call, facts)

        flat = q.flatten(0, 1)
        form = self._form(total, tokens * total * (dim + head_dim_v + 2) * q.element_size(), q.device)
        if size == 1 or tokens == 0:
            partial = merge.allocate(tokens, heads, head_dim_v, q.dtype, q.device, form)
            attend(flat, partial.out, partial.lse)
            out, lse = partial.out, partial.lse
        elif form == "direct":
            memory = self._peers[q.device]
            assert isinstance(memory, PeerMemory)
            direct = Direct.take(memory, flat, total, head_dim_v, self.all_heads)
            flat, partial = direct.gather(flat), direct.partial
            attend(flat, partial.out, partial.lse)
            out, lse = direct.merge()
        else:
            if not self.all_heads:
                flat = merge.gather_heads(flat, self.group)
            partial = merge.allocate(tokens, total, head_dim_v, q.dtype, q.device, form)
            attend(flat, partial.out, partial.lse)
            into = merge.merge_all_heads if self.all_heads else merge.merge
            out, lse = into(partial, self.group, form)
        if attn_sink is not None:
            out = (out * sink_weight(lse, attn_sink).unsqueeze(-1)).to(out.dtype)
        return out.unflatten(0, (batch, queries)), lse.unflatten(0, (batch, queries)).mT

    def _form(self, heads: int, bytes_of_a_rank: int, device: torch.device) -> str:
        """The form of a call whose results have so many heads of all ranks together."""
        size = self.sharding.size
        if size > 1 and self.form in (None, "direct"):
            if device not in self._peers:
                self._peers[device] = PeerMemory.reach(self.group, device, self._agreement)
            peers = self._peers[device]
            if self.form is None and isinstance(peers, PeerMemory) and bytes_of_a_rank <= MAX_BYTES:
                return "direct"
            if self.form == "direct" and isinstance(peers, str):
                raise ValueError(f"form 'direct' cannot be: {peers}")
        form = self.form or ("all_reduce" if heads % size else "all_to_all")
        if heads % size and form not in ("all_reduce", "direct"):
            raise ValueError(f"q must have a number of heads that the {size} ranks divide for {form!r}, got {heads}")
        return form

    def _check_plan(self, q: torch.Tensor, pages: torch.Tensor, plan: ShardPlan) -> None:
        """A plan for other pages, other ranks or other queries gives wrong numbers, and no kernel could tell."""
        checks.instance("plan", plan, ShardPlan)
        if plan.sharding != self.sharding:
            raise ValueError(f"plan must be made for {self.sharding}, got one for {plan.sharding}")
        if plan.page_size != pages.shape[1]:
            raise ValueError(
                f"plan was made for pages of {plan.page_size} tokens on a rank, and k_cache has {pages.shape[1]}"
            )
        if isinstance(q, torch.Tensor) and q.shape[:2] != (plan.requests, plan.queries):
            raise ValueError(
                f"q must have the plan's {plan.requests} requests of {plan.queries} queries, got shape {list(q.shape)}"
            )


def _outputs(out: torch.Tensor, lse: torch.Tensor, rows: tuple[int, ...]) -> dict[str, Any]:
    """out [T, H, d] and lse [T, H] as decode operations take them, for so many (requests, queries)."""
    return {"out": out.unflatten(0, rows), "lse": lse.unflatten(0, rows).mT}
