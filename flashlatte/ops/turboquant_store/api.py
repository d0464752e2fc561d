"""``turboquant_store``: arguments, checks, and choice of the implementation."""

from __future__ import annotations

import torch

from flashlatte.kv_cache.turboquant import as_turboquant_cache
from flashlatte.ops.turboquant_store.reference import TurboQuantStoreParams
from flashlatte.runtime import checks, dispatch, gradients, refusals, value_checks
from flashlatte.runtime.repeat import repeats_launches
from flashlatte.runtime.torch_op import register_op

OPERATION = "turboquant_store"
# A program holds the whole rotation matrix.
_PORTABLE_MAX_HEAD_DIM = 128


def _refuses_portable(call: dispatch.CallSpec) -> str | None:
    return refusals.triton(call) or refusals.head_dim_above(call, _PORTABLE_MAX_HEAD_DIM)


@repeats_launches
def turboquant_store(
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    cache_format: str | None = None,
    backend: str | None = None,
) -> None:
    """Write new keys and values to a TurboQuant cache, in place.

    A key is divided by its norm, rotated by a Hadamard matrix and quantized with a Lloyd-Max codebook for normally
    distributed values. A value is quantized uniformly between its minimum and maximum (``kv_cache.turboquant``;
    arXiv:2504.19874).

    Args:
        key: [T, h_kv, d], bf16, fp16 or float32, last stride 1, d a power of two from 16 to 512; T ≥ n, tokens from n
            on are padding and are not read. T may be 0.
        value: [T, h_kv, d] in key's dtype.
        cache: uint8 [pages, page_size, h_kv, record_bytes], last stride 1, from ``kv_cache.turboquant.allocate`` or
            vLLM.
        slot_mapping: int32 or int64 [n], page · page_size + offset of each token. A token whose slot is outside the
            cache is skipped. Slots must differ from each other.
        cache_format: one of ``kv_cache.turboquant.TURBOQUANT_NAMES``; None infers it from the width of a record.
        backend: "portable" or "reference"; None selects one.

    Norms, scales and minima beyond the range of fp16 saturate. Those of a row with a NaN or an infinity are NaN, as is
    a norm whose square overflows float32.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape, stride or device; inconsistent arguments.
    """
    checks.tensor("key", key, ("T", "h_kv", "d"), checks.FLOAT_DTYPES, may_be_empty=1)
    tokens, heads, head_dim = key.shape
    device = key.device
    checks.tensor("value", value, (tokens, heads, head_dim), (key.dtype,), device)
    layout = as_turboquant_cache(cache, cache_format, head_dim, heads)
    checks.output("cache", cache, ("pages", "page_size", heads, layout.record_bytes), (torch.uint8,), device)
    checks.indices("slot_mapping", slot_mapping, ("n",), device, may_be_empty=1)
    if slot_mapping.shape[0] > tokens:
        raise ValueError(f"slot_mapping must not be longer than key ({tokens} tokens), got {slot_mapping.shape[0]}")
    call = dispatch.CallSpec(OPERATION, device, key.dtype, layout.name, cache.shape[1], head_dim, head_dim, h_kv=heads)
    gradients.warn_if_dropped(OPERATION, key, value)
    value_checks.entries("slot_mapping", slot_mapping, cache.shape[0] * cache.shape[1])
    backend = dispatch.select(call, backend)
    if slot_mapping.shape[0]:
        params = TurboQuantStoreParams(
            key=key, value=value, cache=cache, slot_mapping=slot_mapping, cache_format=layout.name
        )
        _turboquant_store(params, backend)


@register_op(OPERATION, mutates=("cache",))
@dispatch.implemented(OPERATION, portable=_refuses_portable)
def _turboquant_store(params: TurboQuantStoreParams, backend: str) -> None:
    if backend == "portable":
        from flashlatte.ops.turboquant_store.portable.launch import turboquant_store
    else:
        from flashlatte.ops.turboquant_store.reference import turboquant_store

    turboquant_store(params)
