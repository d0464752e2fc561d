"""float64 oracles of the operations: one query token at a time, over an explicit list of its keys.

Nothing is masked: keys that a query does not attend to are never read. ``dtype=torch.bfloat16`` gives the plain
low-precision result that ``compare.assert_accurate`` uses as its baseline.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from flashlatte import kv_cache
from flashlatte.testing.byte_oracles import E4M3_VALUES

NO_KEYS = -math.inf


def dense_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    *,
    q_rope: torch.Tensor | None = None,
    head_dim_v: int = 512,
    softmax_scale: float | None = None,
    causal: bool = False,
    k_scale: float | torch.Tensor | None = None,
    empty_lse: float = NO_KEYS,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``flashlatte.dense_decode``: out [b, s_q, h_q, head_dim_v] in ``dtype`` and lse [b, h_q, s_q] in float64."""
    q = q if q_rope is None else torch.cat((q, q_rope), -1)
    batch, s_q, h_q, head_dim = q.shape
    num_pages, page_size, h_kv, _ = k_cache.shape
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    tables, lengths = block_table.tolist(), cache_seqlens.tolist()
    out = torch.zeros(batch, s_q, h_q, head_dim_v, dtype=dtype, device=q.device)
    lse = torch.full((batch, h_q, s_q), empty_lse, dtype=torch.float64, device=q.device)

    for request, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        length = min(length, len(table) * page_size)
        for token in range(s_q):
            seen = length - s_q + token + 1 if causal else length
            pages, offsets = [], []
            for position in range(seen):
                page = table[position // page_size]
                if 0 <= page < num_pages:
                    pages.append(page)
                    offsets.append(position % page_size)
            if not pages:
                continue
            rows = _key_rows(k_cache, pages, offsets, k_scale)  # [keys, h_kv, d]
            group = h_q // h_kv
            for head in range(h_kv):
                heads = slice(head * group, (head + 1) * group)
                result = _attend(q[request, token, heads], rows[:, head], head_dim_v, scale, dtype)
                out[request, token, heads], lse[request, heads, token], _ = result
    return out, lse


def sparse_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    *,
    q_rope: torch.Tensor | None = None,
    cache_format: str | kv_cache.CacheFormat | None = None,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    head_dim_v: int = 512,
    empty_lse: float = NO_KEYS,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``flashlatte.sparse_decode``: out [b, s_q, h_q, head_dim_v] in ``dtype`` and lse [b, h_q, s_q] in float64.

    ``kv_cache.unpack`` dequantizes the pages of a query's keys; ``byte_oracles`` checks it.
    """
    q = q if q_rope is None else torch.cat((q, q_rope), dim=-1)
    batch, s_q, h_q, head_dim = q.shape
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    scopes = [(k_cache, indices.tolist(), _lengths(topk_length))]
    if extra_k_cache is not None and extra_indices is not None:
        scopes.append((extra_k_cache, extra_indices.tolist(), _lengths(extra_topk_length)))
    out = torch.zeros(batch, s_q, h_q, head_dim_v, dtype=dtype, device=q.device)
    lse = torch.full((batch, h_q, s_q), empty_lse, dtype=torch.float64, device=q.device)

    for request in range(batch):
        for token in range(s_q):
            rows = []
            for cache, selected, lengths in scopes:
                slots = selected[request][token]
                if lengths is not None:
                    length = lengths[request]
                    slots = slots[: max(length[token] if isinstance(length, list) else length, 0)]
                slots = [slot for slot in slots if 0 <= slot < cache.shape[0] * cache.shape[1]]
                if slots:
                    rows.append(_cache_rows(cache, slots, cache_format))
            if rows:
                keys = torch.cat(rows)
                result, row_lse, _ = _attend(q[request, token], keys, head_dim_v, scale, dtype)
                out[request, token] = _with_sink(result, row_lse, attn_sink)
                lse[request, :, token] = row_lse
    return out, lse


def sparse_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    softmax_scale: float | None = None,
    *,
    q_rope: torch.Tensor | None = None,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    empty_lse: float = NO_KEYS,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``flashlatte.sparse_prefill``: out [s_q, h_q, d_v] in ``dtype``, max_logits and lse [s_q, h_q] in float64."""
    q = q if q_rope is None else torch.cat((q, q_rope), dim=-1)
    s_q, h_q, head_dim = q.shape
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    lengths = _lengths(topk_length)
    out = torch.zeros(s_q, h_q, d_v, dtype=dtype, device=q.device)
    max_logits = torch.full((s_q, h_q), -math.inf, dtype=torch.float64, device=q.device)
    lse = torch.full_like(max_logits, empty_lse)

    for token in range(s_q):
        selected = indices[token, 0].tolist()
        if lengths is not None:
            selected = selected[: max(lengths[token], 0)]
        selected = [index for index in selected if 0 <= index < kv.shape[0]]
        if selected:
            result, lse[token], max_logits[token] = _attend(q[token], kv[selected, 0], d_v, scale, dtype)
            out[token] = _with_sink(result, lse[token], attn_sink)
    return out, max_logits, lse


def sparse_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    *,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    d_v: int = 512,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``flashlatte.sparse_attention``: out [s_q, h_q, d_v] in ``dtype`` and lse [s_q, h_q] in float64; differentiable.

    Its gradients are autograd's, which ``flashlatte.sparse_attention`` writes out.
    """
    out, _, lse = sparse_prefill(
        q, kv, indices, softmax_scale, d_v=d_v, attn_sink=attn_sink, topk_length=topk_length, dtype=dtype
    )
    return out, lse


def indexer_loss(
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    index_weights: torch.Tensor,
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor | None = None,
    *,
    topk_length: torch.Tensor | None = None,
    key_start: torch.Tensor | None = None,
    key_end: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    index_scale: float | None = None,
    use_relu: bool = True,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``flashlatte.ops.indexer_loss``: the sum of the divergences, differentiable, and their number.

    Products and softmaxes are in ``dtype``, divergences and their sum in float64.
    """
    scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    score_scale = index_q.shape[2] ** -0.5 if index_scale is None else index_scale
    lengths, starts, ends = _lengths(topk_length), _lengths(key_start), _lengths(key_end)
    losses = []
    for token in range(q.shape[0]):
        if indices is not None:
            keys = indices[token, 0].tolist()
            keys = keys if lengths is None else keys[: max(lengths[token], 0)]
        else:
            assert starts is not None
            assert ends is not None
            keys = list(range(max(starts[token], 0), min(ends[token], kv.shape[0])))
        keys = [key for key in keys if 0 <= key < kv.shape[0]]
        if not keys:
            continue
        probabilities, _ = _weights(q[token], kv[keys, 0].to(dtype), scale, dtype)
        target = probabilities.mean(dim=0).detach().double()
        scores = index_q[token].to(dtype) @ index_k[keys].to(dtype).T * score_scale
        logits = index_weights[token].to(dtype) @ (scores.relu() if use_relu else scores)
        losses.append(torch.nn.functional.kl_div(logits.log_softmax(dim=-1).double(), target, reduction="sum"))
    total = torch.stack(losses).sum() if losses else torch.zeros((), dtype=torch.float64, device=q.device)
    return total, torch.tensor(len(losses), device=q.device)


def dense_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window: int | tuple[int, int] | None = None,
    empty_lse: float = NO_KEYS,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``flashlatte.dense_prefill``: out [T_q, h, d_v] in ``dtype`` and lse [T_q, h] in float64; differentiable."""
    total_q, h_q, head_dim = q.shape
    group = h_q // k.shape[1]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    before, after = (window - 1, 0) if isinstance(window, int) else (-1, -1) if window is None else window
    boundaries_q, boundaries_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    out = torch.zeros(total_q, h_q, v.shape[2], dtype=dtype, device=q.device)
    lse = torch.full((total_q, h_q), empty_lse, dtype=torch.float64, device=q.device)

    for request in range(len(boundaries_q) - 1):
        first_q, end_q = boundaries_q[request : request + 2]
        first_k, end_k = boundaries_k[request : request + 2]
        for token in range(first_q, end_q):
            position = end_k - 1 - (end_q - 1 - token)
            keys = range(first_k, end_k)
            if causal:
                keys = [key for key in keys if key <= position]
            if before >= 0:
                keys = [key for key in keys if key >= position - before]
            if after >= 0:
                keys = [key for key in keys if key <= position + after]
            for head in range(h_q if len(keys) else 0):
                row, value = k[list(keys), head // group], v[list(keys), head // group].to(dtype)
                weights, row_lse = _weights(q[token, head, None], row.to(dtype), scale, dtype)
                out[token, head] = (weights @ value)[0]
                lse[token, head] = row_lse[0]
    return out, lse


def merge_states(
    outs: Sequence[torch.Tensor] | torch.Tensor, lses: Sequence[torch.Tensor] | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``flashlatte.merge_states`` in float64, one row at a time."""
    states, state_lses = list(outs), list(lses)
    shape, width = states[0].shape, states[0].shape[-1]
    rows = [state.double().reshape(-1, width) for state in states]
    row_lses = [state_lse.double().reshape(-1).tolist() for state_lse in state_lses]
    out = torch.zeros(rows[0].shape, dtype=torch.float64, device=rows[0].device)
    lse = []
    for row in range(out.shape[0]):
        present = [(state_lse[row], state[row]) for state_lse, state in zip(row_lses, rows, strict=True)]
        present = [(value, state) for value, state in present if not math.isinf(value)]
        if not present:
            lse.append(-math.inf)
            continue
        largest = max(value for value, _ in present)
        weights = [math.exp(value - largest) for value, _ in present]
        total = math.fsum(weights)
        for weight, (_, state) in zip(weights, present, strict=True):
            out[row] += weight / total * state
        lse.append(largest + math.log(total))
    return out.reshape(shape), torch.tensor(lse, dtype=torch.float64, device=out.device).reshape(shape[:-1])


def _attend(
    queries: torch.Tensor, keys: torch.Tensor, head_dim_v: int, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out [h, head_dim_v] in ``dtype``, lse [h] and the maximum logit [h] in float64. Needs at least one key [n, d]."""
    keys = keys.to(dtype)
    weights, lse = _weights(queries, keys, scale, dtype)
    return weights @ keys[:, :head_dim_v], lse, (queries.to(dtype) @ keys.T * scale).double().amax(dim=-1)


def _weights(
    queries: torch.Tensor, keys: torch.Tensor, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities [h, n] in ``dtype`` and lse [h] in float64. Needs at least one key [n, d] in ``dtype``."""
    logits = queries.to(dtype) @ keys.T * scale
    exact = logits.double()
    largest = exact.amax(dim=-1)
    return torch.softmax(logits, dim=-1), largest + (exact - largest[:, None]).exp().sum(dim=-1).log()


def _with_sink(out: torch.Tensor, lse: torch.Tensor, attn_sink: torch.Tensor | None) -> torch.Tensor:
    """Rescale ``out``: a sink is an additional key with logit ``attn_sink`` and value 0."""
    if attn_sink is None:
        return out
    factor = torch.sigmoid(lse - attn_sink.double())
    return out * factor[:, None].to(out.dtype)


def _key_rows(
    k_cache: torch.Tensor, pages: list[int], offsets: list[int], k_scale: float | torch.Tensor | None
) -> torch.Tensor:
    if k_cache.dtype != torch.float8_e4m3fn:
        return k_cache[pages, offsets]
    values = torch.tensor(E4M3_VALUES, dtype=torch.float64, device=k_cache.device)
    rows = values[k_cache.view(torch.uint8)[pages, offsets].long()]
    return rows if k_scale is None else rows * k_scale


def _cache_rows(cache: torch.Tensor, slots: list[int], cache_format: str | kv_cache.CacheFormat | None) -> torch.Tensor:
    page_size = cache.shape[1]
    pages = sorted({slot // page_size for slot in slots})
    position = {page: index for index, page in enumerate(pages)}
    layout = kv_cache.infer_format(cache) if cache_format is None else cache_format
    raw = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
    rows = kv_cache.unpack(raw[pages], layout, dtype=torch.float32)
    return rows[[position[slot // page_size] for slot in slots], [slot % page_size for slot in slots], 0]


def _lengths(lengths: torch.Tensor | None) -> list | None:
    return None if lengths is None else lengths.tolist()
