"""The implementations of ``paged_attention``, and the calls that each accepts."""

from __future__ import annotations

import torch

from flashlatte.ops.paged_attention import reference
from flashlatte.ops.paged_attention.params import PagedAttentionParams
from flashlatte.runtime import checks, dispatch, refusals

OPERATION = "paged_attention"
_HALVES = (torch.bfloat16, torch.float16)
# A whole row is one tile in shared memory.
_PORTABLE_MAX_HEAD_DIM = 512
# Keys must fit shared memory, and values a consumer's registers.
_HOPPER_MAX_HEAD_DIM, _HOPPER_MAX_HEAD_DIM_V = 192, 128
# The smallest TMA box of keys; a page consists of whole boxes.
_HOPPER_PAGE_SIZE = 16
# With fewer query rows for one request, more than half of an H100's SMs would have no tile of 128 rows;
# the portable kernel splits keys.
HOPPER_MIN_ROWS = 8192


def _refuses_hopper(call: dispatch.CallSpec) -> str | None:
    return (
        refusals.dtype(call, *_HALVES)
        or refusals.capability(call, 9, 0)
        or refusals.page_size(call, _HOPPER_PAGE_SIZE)
        or _refuses_head_dims(call)
        or refusals.unaligned(call)
        or (call.optional_features and f"does not take {call.optional_features}")
        or _refuses_few_rows(call)
    )


def _refuses_head_dims(call: dispatch.CallSpec) -> str | None:
    head_dim, head_dim_v = call.head_dim or 0, call.head_dim_v or 0
    if head_dim <= _HOPPER_MAX_HEAD_DIM and head_dim_v <= _HOPPER_MAX_HEAD_DIM_V:
        return None
    return (
        f"takes head dims up to {_HOPPER_MAX_HEAD_DIM} with {_HOPPER_MAX_HEAD_DIM_V}, not {head_dim} with {head_dim_v}"
    )


def _refuses_few_rows(call: dispatch.CallSpec) -> str | None:
    if call.rows is None or call.rows >= HOPPER_MIN_ROWS:
        return None
    return (
        f"takes calls in which one request can have {HOPPER_MIN_ROWS} query rows (tokens times heads) and every other "
        f"request one token; here it can have {max(call.rows, 0)}"
    )


def _refuses_portable(call: dispatch.CallSpec) -> str | None:
    return refusals.triton_attention(call, _PORTABLE_MAX_HEAD_DIM)


def _load_hopper() -> dispatch.Function:
    from flashlatte.ops.paged_attention.by_length import paged_attention

    return paged_attention


def _load_portable() -> dispatch.Function:
    from flashlatte.ops.paged_attention.portable import paged_attention

    return paged_attention


dispatch.define(
    OPERATION,
    dispatch.Implementation("hopper", _load_hopper, _refuses_hopper),
    dispatch.Implementation("portable", _load_portable, _refuses_portable),
    dispatch.Implementation("reference", lambda: reference.paged_attention),
)


def call_spec(params: PagedAttentionParams) -> dispatch.CallSpec:
    """The properties of a call that implementations accept or refuse."""
    q, k_cache, v_cache = params.q, params.k_cache, params.v_cache
    tokens, h_q, head_dim = q.shape
    _, page_size, h_kv, head_dim_v = v_cache.shape
    return dispatch.CallSpec(
        OPERATION,
        q.device,
        q.dtype,
        page_size=page_size,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        h_q=h_q,
        h_kv=h_kv,
        # Maximum for one request; every other request has at least one token.
        rows=(tokens - params.cu_seqlens_q.shape[0] + 2) * h_q,
        optional_features=_optional_features(params),
        rows_aligned=all(map(checks.rows_aligned, (q, k_cache, v_cache))),
    )


def _optional_features(params: PagedAttentionParams) -> str | None:
    """The given features that some implementation lacks, in words, or None."""
    k_cache, dtype = params.k_cache, params.q.dtype
    present = {
        "a quantised cache": k_cache.dtype != dtype,
        "rows of a cache in pieces": k_cache.shape[3] > 1 or k_cache.stride(4) != 1 or params.v_cache.stride(3) != 1,
        "k and v in addition to the cache": params.k is not None,
        "prefix_ranges": params.prefix_ranges is not None,
        "softcap": params.softcap > 0,
        "alibi_slopes": params.alibi_slopes is not None,
        "qq_bias": params.qq_bias is not None,
        "out in float8_e4m3fn": params.out.dtype != dtype,
    }
    return ", ".join(words for words, is_present in present.items() if is_present) or None
