"""``turboquant_gather``: arguments, checks, and choice of the implementation."""

from __future__ import annotations

import torch

from flashlatte.kv_cache import gather_slots
from flashlatte.kv_cache.turboquant import as_turboquant_cache
from flashlatte.ops.turboquant_gather.reference import TurboQuantGatherParams
from flashlatte.runtime import checks, dispatch, refusals
from flashlatte.runtime.repeat import repeats_launches
from flashlatte.runtime.torch_op import register_op

OPERATION = "turboquant_gather"
# A program holds the whole rotation matrix.
_PORTABLE_MAX_HEAD_DIM = 128


def _refuses_portable(call: dispatch.CallSpec) -> str | None:
    return refusals.triton(call) or refusals.head_dim_above(call, _PORTABLE_MAX_HEAD_DIM)


@repeats_launches
def turboquant_gather(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    total_tokens: int,
    head_dim: int,
    *,
    cache_format: str | None = None,
    seq_starts: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    key: torch.Tensor | None = None,
    value: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather keys and values of several requests from a TurboQuant cache, dequantized, with the rotation undone.

    The result can be passed to ``dense_prefill``, for prefill over a cached context.

    Args:
        cache: uint8 [pages, page_size, h_kv, record_bytes], last stride 1.
        block_table: int32 or int64 [b, max_pages], the pages of each request in order. b may be 0.
        cu_seqlens: int32 or int64 [b + 1]: request i goes to rows cu_seqlens[i] to cu_seqlens[i + 1]. Or [b]: the last
            request then extends to the end of the result.
        total_tokens: rows of the result.
        head_dim: elements of a key and of a value.
        cache_format: one of ``kv_cache.turboquant.TURBOQUANT_NAMES``; None infers it from the width of a record.
        seq_starts: int32 or int64 [b], the first token of each request; 0 if None.
        dtype: dtype of the result: bf16, fp16 or float32.
        key, value: [total_tokens, h_kv, head_dim] in ``dtype`` with last stride 1, to write to. Rows from cu_seqlens[b]
            on are not written.
        backend: "portable" or "reference"; None selects one.

    Returns:
        key and value [total_tokens, h_kv, head_dim]. Tokens whose page is not in the table or not in the cache are
        returned as zeros.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape, stride or device; inconsistent arguments.
    """
    layout = as_turboquant_cache(cache, cache_format, checks.positive_int("head_dim", head_dim))
    gather_slots.check(block_table, cu_seqlens, seq_starts, cache.device)
    if dtype not in checks.FLOAT_DTYPES:
        raise TypeError(f"dtype must be {checks.dtype_names(checks.FLOAT_DTYPES)}, got {dtype}")
    shape = (checks.positive_int("total_tokens", total_tokens, or_zero=True), cache.shape[2], head_dim)
    key = checks.output_or_new("key", key, shape, dtype, cache.device, zeros=True)
    value = checks.output_or_new("value", value, shape, dtype, cache.device, zeros=True, key=key)
    call = dispatch.CallSpec(
        OPERATION, cache.device, dtype, layout.name, cache.shape[1], head_dim, head_dim, h_kv=cache.shape[2]
    )
    backend = dispatch.select(call, backend)
    gather_slots.check_values(cache, block_table, cu_seqlens, seq_starts, total_tokens)
    if total_tokens and block_table.shape[0]:
        params = TurboQuantGatherParams(
            cache=cache,
            block_table=block_table,
            cu_seqlens=cu_seqlens,
            seq_starts=seq_starts,
            cache_format=layout.name,
            key=key,
            value=value,
        )
        _turboquant_gather(params, backend)
    return key, value


@register_op(OPERATION, mutates=("key", "value"))
@dispatch.implemented(OPERATION, portable=_refuses_portable)
def _turboquant_gather(params: TurboQuantGatherParams, backend: str) -> None:
    if backend == "portable":
        from flashlatte.ops.turboquant_gather.portable import turboquant_gather
    else:
        from flashlatte.ops.turboquant_gather.reference import turboquant_gather

    turboquant_gather(params)
