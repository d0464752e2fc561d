"""``BatchMLAPagedAttentionWrapper``: absorbed MLA over a paged latent cache, planned once for all layers of a step."""

from __future__ import annotations

import torch

from flashlatte.flashinfer import page_tables, plans
from flashlatte.flashinfer.attend import attend, by_token
from flashlatte.flashinfer.conventions import LOG2_E, joined_cache, own_backend, refuse, rows_of
from flashlatte.flashinfer.decode import trtllm_batch_decode_with_kv_cache_mla, xqa_batch_decode_with_kv_cache_mla
from flashlatte.runtime import checks

__all__ = [
    "BatchMLAPagedAttentionWrapper",
    "trtllm_batch_decode_with_kv_cache_mla",
    "xqa_batch_decode_with_kv_cache_mla",
]

Q_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# FlashInfer's "cutlass" kernel has no argument for its scale, which is that of DeepSeek-V2 and V3.
CUTLASS_SCALE = (128 + 64) ** -0.5


class BatchMLAPagedAttentionWrapper:
    """Decode and incremental prefill of MLA, with FlashInfer's arguments.

    The operation is ``flashlatte.dense_decode``; with pages of one token ``flashlatte.sparse_decode``, whose Hopper
    kernel gathers tokens. ``plan`` is called once for a step, ``run`` for each layer.

    Args:
        float_workspace_buffer: its device is that of the inputs; it is not written to.
        use_cuda_graph: ``plan`` writes to memory that stays in place, so that a captured ``run`` computes what the last
            ``plan`` before a replay says. The first plan determines the number of query tokens that later plans must
            not exceed, and whether all requests have the same number of queries, above 1: then later plans must keep
            it. Padding requests without queries may follow. The wrapper keeps a table of as many entries as kv_indices
            has or 2^22, whichever is more (at most kv_indices for each row); a request may have no more pages than
            fit into a row.
        qo_indptr, kv_indptr, kv_indices, kv_len_arr: with ``use_cuda_graph``: int32 [b + 1], [b + 1], [pages] and [b],
            buffers to which ``plan`` copies its arguments.
        backend: "auto", "fa2" or "fa3", which mean FlashLatte's choice; "cutlass", for which ``run`` takes kv_len and
            page_table and there is no plan; or "hopper", "portable" or "reference".

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        self._device = checks.given("float_workspace_buffer", float_workspace_buffer).device
        self._backend = own_backend(backend, ("auto", "fa2", "fa3", "cutlass"))
        self._is_cutlass = backend == "cutlass"
        self._buffers: tuple[torch.Tensor, ...] | None = None
        if checks.flag("use_cuda_graph", use_cuda_graph) and not self._is_cutlass:
            buffers = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
            self._buffers = tuple(
                checks.tensor(name, buffer, ("n",), (torch.int32,), self._device)
                for name, buffer in zip(plans.LISTS, buffers, strict=True)
            )
            page_tables.check_lists(*self._buffers)
        self._plan: plans.MLAPlan | None = None

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
    ) -> None:
        """Set what the following calls of ``run`` compute.

        It reads the three small lists on the host: one synchronization if they are on the GPU, none if they are on the
        CPU. Then it writes the table of pages in four small kernels, once for all layers.

        Args:
            qo_indptr: int32 or int64 [b + 1], boundaries of the requests' query tokens, from 0.
            kv_indptr: int32 or int64 [b + 1], boundaries of the requests' pages in kv_indices.
            kv_indices: int32 or int64, the pages of all requests.
            kv_len_arr: int32 or int64 [b], keys of each request; more than its pages hold are not read.
            num_heads, head_dim_ckv, head_dim_kpe: shapes of the queries and the cache. head_dim_kpe may be 0.
            page_size: tokens in a page.
            causal: bottom-right: the last query of a request attends to all of its keys.
            sm_scale: above 0.
            q_data_type: dtype of the queries: bf16, fp16, or float32 (reference only).
            kv_data_type: the same, or float8_e4m3fn.
            use_profiler: must be False.

        Raises:
            TypeError, ValueError: an argument of the wrong type, dtype, shape or device; boundaries that decrease or
                leave kv_indices; in CUDA-graph mode more requests, tokens or pages than fit, or another number of
                queries for each request.
        """
        if self._is_cutlass:
            raise ValueError("backend must not be 'cutlass' for plan: run takes kv_len and page_table")
        refuse("there is no profiler", use_profiler=use_profiler)
        requests = page_tables.check_lists(qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        checks.dtype("q_data_type", q_data_type, Q_DTYPES)
        checks.dtype("kv_data_type", kv_data_type, (q_data_type, torch.float8_e4m3fn))
        shape = plans.MLAShape(
            checks.positive_int("num_heads", num_heads),
            checks.positive_int("head_dim_ckv", head_dim_ckv),
            checks.positive_int("head_dim_kpe", head_dim_kpe, or_zero=True),
            checks.positive_int("page_size", page_size),
            q_data_type,
            kv_data_type,
        )
        scale = checks.score_factor("sm_scale", sm_scale)
        qo, kv, lengths = page_tables.on_host(qo_indptr[: requests + 1], kv_indptr[: requests + 1], kv_len_arr)
        page_tables.check_boundaries("qo_indptr", qo)
        page_tables.check_boundaries("kv_indptr", kv, kv_indices.shape[0])
        if qo[0] != 0:
            raise ValueError(f"qo_indptr must begin with 0, got {int(qo[0])}")
        earlier = self._plan if self._buffers is not None else None
        queries = None if earlier is None else earlier.queries
        if by_token(page_size, kv_data_type, q_data_type):
            queries = 1
        rows = page_tables.decode_rows(qo, kv, lengths, page_size, checks.flag("causal", causal), queries)
        # Rows of single tokens have their mask in their lengths.
        causal = causal and rows.queries > 1
        if self._buffers is None:
            self._plan = plans.eager_plan(shape, causal, scale, rows, kv_indices.to(self._device))
        else:
            lists = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
            self._plan = plans.graph_plan(shape, causal, scale, rows, lists, self._buffers, earlier)

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: torch.Tensor | None = None,
        kv_len: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        ckv_scale: float | None = None,
        kpe_scale: float | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of the planned requests. It does not synchronize, and may be captured.

        Args:
            q_nope, q_pe: [T, num_heads, head_dim_ckv] and [T, num_heads, head_dim_kpe] in the planned dtype, with any
                strides except the last. T may exceed the planned tokens: out of the others is 0, lse -inf.
            ckv_cache, kpe_cache: [pages, page_size, head_dim_ckv] and [pages, page_size, head_dim_kpe], adjacent
                columns of one tensor [pages, page_size, head_dim_ckv + head_dim_kpe]: no kernel reads two.
            out: [T, num_heads, head_dim_ckv] in q_nope's dtype to write to.
            lse: float32 [T, num_heads] to write to, with or without ``return_lse``.
            return_lse: also return lse.
            profiler_buffer, o_scale: must be None.
            kv_len, page_table: backend "cutlass" only: int32 or int64 [T] and [T, max_pages]; the softmax scale is
                192^-0.5.
            return_lse_base_on_e: lse is the natural logarithm instead of the base-2 one.
            ckv_scale, kpe_scale: a float8_e4m3fn cache only, where both must be given: element · scale. If they differ,
                q_pe is multiplied by kpe_scale / ckv_scale and rounded to its dtype.

        Returns:
            out [T, num_heads, head_dim_ckv], or (out, lse). A query without visible keys has out 0 and lse -inf.

        Raises:
            TypeError, ValueError: an argument of the wrong type, dtype, shape, stride or device; parts of a cache that
                are not adjacent; no plan; an argument that must be left out.
        """
        checks.flag("return_lse", return_lse)
        checks.flag("return_lse_base_on_e", return_lse_base_on_e)
        refuse("there is no profiler", profiler_buffer=profiler_buffer)
        refuse("out has q_nope's dtype", o_scale=o_scale)
        plan = self._cutlass_plan(q_nope, q_pe, ckv_cache, kv_len, page_table) if self._is_cutlass else self._plan
        if plan is None:
            raise ValueError("plan must be called before run")
        heads, width, added, page_size, q_dtype, kv_dtype = plan.shape
        checks.tensor("q_nope", q_nope, ("T", heads, width), (q_dtype,), self._device, may_be_empty=1)
        tokens = q_nope.shape[0]
        if tokens < plan.tokens:
            raise ValueError(f"q_nope must have the {plan.tokens} tokens of qo_indptr, got {tokens}")
        checks.tensor("q_pe", q_pe, (tokens, heads, added), (q_dtype,), self._device)
        checks.tensor("ckv_cache", ckv_cache, ("pages", page_size, width), (kv_dtype,), self._device, may_be_empty=1)
        pages = ckv_cache.shape[0]
        checks.tensor("kpe_cache", kpe_cache, (pages, page_size, added), (kv_dtype,), self._device)
        cache = joined_cache(ckv_cache, kpe_cache)
        k_scale, q_pe = _scaled(q_pe, kv_dtype, ckv_scale, kpe_scale)
        out = checks.output_or_new("out", out, (tokens, heads, width), q_dtype, self._device, q_nope=q_nope)
        if return_lse or lse is not None:
            shape = (tokens, heads)
            lse = checks.output_or_new("lse", lse, shape, torch.float32, self._device, unit_last_stride=False)
        rows = min(tokens // plan.queries, plan.lengths.shape[0]) if pages else 0
        for part, table in plan.tables(rows):
            of_part = slice(part.start * plan.queries, part.stop * plan.queries)
            attend(
                rows_of(q_nope, of_part),
                cache,
                table,
                rows_of(plan.lengths, part),
                plan.queries,
                q_rope=rows_of(q_pe, of_part) if added else None,
                causal=plan.causal,
                softmax_scale=plan.softmax_scale,
                k_scale=k_scale,
                out=rows_of(out, of_part),
                lse=None if lse is None else rows_of(lse, of_part),
                backend=self._backend,
            )
        used = rows * plan.queries
        if used < tokens:
            out[used:].zero_()
        if lse is None:
            return out
        if used < tokens:
            lse[used:].fill_(-torch.inf)
        if not return_lse_base_on_e:
            lse.mul_(LOG2_E)
        return (out, lse) if return_lse else out

    def _cutlass_plan(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kv_len: torch.Tensor | None,
        page_table: torch.Tensor | None,
    ) -> plans.MLAPlan:
        for name, x in (("q_nope", q_nope), ("q_pe", q_pe), ("ckv_cache", ckv_cache)):
            if checks.given(name, x).dim() != 3:
                raise ValueError(f"{name} must have three axes, got {list(x.shape)}")
        tokens, heads, width = q_nope.shape
        shape = plans.MLAShape(heads, width, q_pe.shape[2], ckv_cache.shape[1], q_nope.dtype, ckv_cache.dtype)
        lengths = checks.indices("kv_len", kv_len, (tokens,), self._device)
        table = checks.tensor("page_table", page_table, (tokens, "pages"), checks.INDEX_DTYPES, self._device)
        return plans.MLAPlan(shape, False, CUTLASS_SCALE, 1, tokens, lengths, table)


def _scaled(
    q_pe: torch.Tensor, kv_dtype: torch.dtype, ckv_scale: float | None, kpe_scale: float | None
) -> tuple[float | None, torch.Tensor]:
    """The scale of a cache's keys, and q_pe for keys with this scale."""
    if kv_dtype != torch.float8_e4m3fn:
        refuse("the cache has no scales", ckv_scale=ckv_scale, kpe_scale=kpe_scale)
        return None, q_pe
    scale = checks.float32_factor("ckv_scale", ckv_scale)
    other = checks.float32_factor("kpe_scale", kpe_scale)
    return scale, q_pe if other == scale else q_pe * (other / scale)
