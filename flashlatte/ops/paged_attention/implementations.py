"""The implementations of ``paged_attention``, and the calls that each accepts."""

from __future__ import annotations

import torch

from flashlatte.ops.paged_attention import reference
from flashlatte.runtime import dispatch, refusals

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


def optional_features(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None,
    prefix_ranges: torch.Tensor | None,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    qq_bias: torch.Tensor | None,
    out: torch.Tensor,
) -> str | None:
    """The given features that some implementation lacks, in words, or None."""
    present = {
        "a quantised cache": k_cache.dtype != q.dtype,
        "rows of a cache in pieces": k_cache.shape[3] > 1 or k_cache.stride(4) != 1 or v_cache.stride(3) != 1,
        "k and v in addition to the cache": k is not None,
        "prefix_ranges": prefix_ranges is not None,
        "softcap": softcap > 0,
        "alibi_slopes": alibi_slopes is not None,
        "qq_bias": qq_bias is not None,
        "out in float8_e4m3fn": out.dtype != q.dtype,
    }
    return ", ".join(words for words, is_present in present.items() if is_present) or None
