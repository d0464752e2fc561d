"""``compress``: arguments, checks, and choice of the implementation."""

from __future__ import annotations

import torch

from flashlatte.kernels import rope
from flashlatte.kv_cache.formats import CacheFormat
from flashlatte.kv_cache.row_caches import as_row_cache, refuses_rows
from flashlatte.ops.compress.reference import CompressParams
from flashlatte.runtime import checks, dispatch, gradients, refusals, value_checks
from flashlatte.runtime.repeat import repeats_launches
from flashlatte.runtime.torch_op import register_op

OPERATION = "compress"


def _refuses_portable(call: dispatch.CallSpec) -> str | None:
    return refusals.triton(call) or refuses_rows(call)


@repeats_launches
def compress(
    kv: torch.Tensor,
    score: torch.Tensor,
    ape: torch.Tensor,
    weight: torch.Tensor,
    cos_sin: torch.Tensor,
    request_ids: torch.Tensor,
    positions: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    state_cache: torch.Tensor | None = None,
    state_table: torch.Tensor | None = None,
    eps: float = 1e-6,
    cache_format: str | CacheFormat | None = None,
    scale_rounding: str = "power_of_two",
    backend: str | None = None,
) -> None:
    """Compress each group of ``ratio`` tokens that these tokens complete, and write the rows to a paged cache.

    DeepSeek-V4's compressor. Group g of a request consists of its tokens g · ratio to (g + 1) · ratio - 1. Its row in
    channel c is Σ_t softmax_t(score[t, c] + ape[t mod ratio, c]) · kv[t, c]. The row is normalized (RMSNorm), its last
    rope_dim elements are rotated in pairs (2i, 2i + 1) by position g · ratio, and it is quantized. Everything is
    computed in float32. If kv is twice as wide as a row (ratio 4), the sum also runs over the preceding group: its
    tokens contribute the first half of their elements, the group's own tokens the second half. Group 0 has no preceding
    group.

    The tokens of a group may be split over several calls. Each call writes its last tokens to ``state_cache``, as
    float32 [kv, score + ape], from which later calls read them. A position is stored in column ``position //
    page_size`` of the request's table row, modulo the number of columns: a short table is a ring buffer. The ring must
    hold (1 + overlap) · ratio - 1 tokens, plus the tokens that may be rolled back (rejected drafts). A repeated
    position overwrites its state. A row is therefore bitwise identical for every split of its tokens into calls.

    Args:
        kv, score: [T, width], width being head_dim, or 2 · head_dim with overlap; bf16, fp16 or float32. T may be 0.
        ape: float32 [ratio, width], added to the scores by index in the group.
        weight: [head_dim], of the RMSNorm; bf16, fp16 or float32.
        cos_sin: float32 [n, rope_dim], the cosines, then the sines of each frequency. Positions beyond the table are
            clamped.
        request_ids: int32 or int64 [T], the row of ``state_table`` of each token. Tokens of a request are consecutive
            and in order. A token with an id outside the table is padding.
        positions: int32 or int64 [T], the position of each token in its request. Positions from 2³¹ on are not stored
            in the states.
        cache: [pages, page_size, 1, width] (or without the 1) that takes rows of head_dim, in a format of latents
            (``model1``, ``v41``, ``v41_fp4``, ``bf16``, ``fp16``, ``fp32``) or of index keys.
        slot_mapping: int32 or int64 [T]: the slot, page · page_size + offset, of the row of the group that the token
            completes; not read for other tokens. A row whose slot is outside the cache is skipped.
        state_cache: float32 [pages, page_size, 2 · width]; None if every request begins in this call and no later call
            continues it.
        state_table: int32 or int64 [b, columns], given with ``state_cache``; pages outside the cache are ignored.
        eps: epsilon of the RMSNorm.
        cache_format: None infers it from the cache.
        scale_rounding: for format ``index_fp8``: "power_of_two" (V4) or "exact".
        backend: "portable" or "reference"; None selects one.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device; inconsistent arguments.
    """
    checks.tensor("kv", kv, ("T", "width"), checks.FLOAT_DTYPES, may_be_empty=1)
    tokens, width = kv.shape
    device = kv.device
    checks.tensor("score", score, (tokens, width), (kv.dtype,), device)
    checks.tensor("ape", ape, ("ratio", width), (torch.float32,), device)
    checks.tensor("weight", weight, ("head_dim",), checks.FLOAT_DTYPES, device)
    head_dim = weight.shape[0]
    if width not in (head_dim, 2 * head_dim):
        raise ValueError(f"kv must be {head_dim} wide like weight, or twice that with overlap, got {width}")
    rope.check_rotation(cos_sin, positions, tokens, head_dim, device)
    for name, value in (("request_ids", request_ids), ("slot_mapping", slot_mapping)):
        checks.indices(name, value, (tokens,), device)
    cache, layout = as_row_cache(cache, cache_format, head_dim, scale_rounding, device)
    _check_state(state_cache, state_table, ape, width // head_dim, device)
    eps = checks.epsilon("eps", eps)
    gradients.warn_if_dropped(OPERATION, kv, score, ape, weight)
    call = dispatch.CallSpec(OPERATION, device, kv.dtype, layout.name, cache.shape[1], head_dim)
    backend = dispatch.select(call, backend)
    if tokens == 0:
        return
    params = CompressParams(
        kv=kv,
        score=score,
        ape=ape,
        weight=weight,
        eps=eps,
        cos_sin=cos_sin,
        request_ids=request_ids,
        positions=positions,
        slot_mapping=slot_mapping,
        cache=cache,
        cache_format=layout.name,
        scale_rounding=scale_rounding,
        state_cache=state_cache,
        state_table=state_table,
    )
    _check_values(params)
    _compress(params, backend)


@register_op(OPERATION, mutates=("cache", "state_cache"))
@dispatch.implemented(OPERATION, portable=_refuses_portable)
def _compress(params: CompressParams, backend: str) -> None:
    if backend == "portable":
        from flashlatte.ops.compress.portable.launch import compress
    else:
        from flashlatte.ops.compress.reference import compress

    compress(params)


def _check_state(
    state_cache: torch.Tensor | None,
    state_table: torch.Tensor | None,
    ape: torch.Tensor,
    groups: int,
    device: torch.device,
) -> None:
    if state_cache is None or state_table is None:
        if state_cache is not state_table:
            raise ValueError("state_cache and state_table must be given together, got only one")
        return
    ratio, width = ape.shape
    checks.output("state_cache", state_cache, ("pages", "page_size", 2 * width), (torch.float32,), device)
    checks.tensor("state_table", state_table, ("b", "columns"), checks.INDEX_DTYPES, device)
    room, needed = state_table.shape[1] * state_cache.shape[1], groups * ratio - 1
    if room < needed:
        raise ValueError(
            f"state_table must have room for {needed} tokens of a request, got {state_table.shape[1]} pages of "
            f"{state_cache.shape[1]}"
        )


def _check_values(params: CompressParams) -> None:
    """Check the slots of tokens that complete a group, and the pages of the tokens' states."""
    request_ids, positions, cache = params.request_ids, params.positions, params.cache
    states, table = params.state_cache, params.state_table
    if not value_checks.readable(request_ids):
        return
    is_token = (request_ids >= 0) & (positions >= 0)
    finishes = is_token & ((positions + 1) % params.ratio == 0)
    value_checks.entries("slot_mapping", params.slot_mapping, cache.shape[0] * cache.shape[1], finishes)
    if states is not None and table is not None:
        value_checks.entries("request_ids", request_ids, table.shape[0], is_token)
        column = positions[is_token].long() // states.shape[1] % table.shape[1]
        value_checks.entries("state_table", table[request_ids[is_token].long(), column], states.shape[0])
