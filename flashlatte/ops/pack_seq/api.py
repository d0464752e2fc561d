"""``pack_seq`` and ``unpack_seq``: arguments, checks, and choice of the implementation."""

from __future__ import annotations

import functools
import math

import torch

from flashlatte.runtime import checks, dispatch, gradients, refusals
from flashlatte.runtime.repeat import repeats_launches
from flashlatte.runtime.torch_op import register_op

PACK, UNPACK = "pack_seq", "unpack_seq"
DTYPES = (
    *checks.FLOAT_DTYPES,
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int8, torch.int32),
)


@repeats_launches
def pack_seq(
    x: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    *,
    pad_value: float = -math.inf,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Pad packed requests to rows of ``max_seqlen`` tokens.

    It has no backward pass, and warns once if gradients are enabled and an input requires one.

    Args:
        x: [T, …], bf16, fp16, float32, e4m3, e5m2, uint8, int8 or int32; the elements of a token contiguous. T may be
            0.
        cu_seqlens: int32 or int64 [b + 1]: request i has tokens cu_seqlens[i] to cu_seqlens[i + 1] - 1.
        max_seqlen: tokens of a row, at least 0. Longer requests are truncated.
        pad_value: a number that is representable in x's dtype (in e4m3 an infinity becomes NaN), for positions after a
            request's tokens, and where ``cu_seqlens`` exceeds T.
        out: [b, max_seqlen, …] in x's dtype to write to, contiguous.
        backend: "portable" or "reference"; None selects one.

    Returns:
        [b, max_seqlen, …].

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape, stride or device.
    """
    rows = _rows("x", x, 1)
    requests = _check_boundaries(cu_seqlens, x.device)
    max_seqlen = checks.positive_int("max_seqlen", max_seqlen, or_zero=True)
    # As text, because a cache of numbers takes -0.0 for 0.0.
    pad = _bits(checks.number("pad_value", pad_value).hex(), x.dtype)
    shape = (requests, max_seqlen, *x.shape[1:])
    if out is None:
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
    else:
        checks.output("out", out, shape, (x.dtype,), x.device)
        checks.contiguous(out=out)
        checks.no_overlap("out", out, x=x)
    gradients.warn_if_dropped(PACK, x)
    backend = dispatch.select(dispatch.CallSpec(PACK, x.device, x.dtype), backend)
    if out.numel():
        _pack_seq(_storage(rows), cu_seqlens, pad, _storage(out).flatten(2), backend)
    return out


@register_op(PACK, mutates=("out",))
@dispatch.implemented(PACK, portable=refusals.triton)
def _pack_seq(x: torch.Tensor, cu_seqlens: torch.Tensor, pad: int, out: torch.Tensor, backend: str) -> None:
    if backend == "portable":
        from flashlatte.ops.pack_seq.portable import pack_seq
    else:
        from flashlatte.ops.pack_seq.reference import pack_seq

    pack_seq(x, cu_seqlens, pad, out)


@repeats_launches
def unpack_seq(
    packed: torch.Tensor,
    cu_seqlens: torch.Tensor,
    total_tokens: int,
    *,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """The inverse of ``pack_seq``: concatenate the tokens of all requests.

    Args:
        packed: [b, max_seqlen, …] in one of ``pack_seq``'s dtypes; the elements of a token contiguous.
        cu_seqlens: int32 or int64 [b + 1]: request i goes to tokens cu_seqlens[i] to cu_seqlens[i + 1] - 1.
        total_tokens: tokens of the result.
        out: [total_tokens, …] in packed's dtype to write to, the elements of a token contiguous. Tokens that no row has
            are not written.
        backend: "portable" or "reference"; None selects one.

    Returns:
        [total_tokens, …]. Tokens that no row has, such as those truncated by ``pack_seq``, are 0 if ``out`` is None.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape, stride or device.
    """
    rows = _rows("packed", packed, 2)
    requests = _check_boundaries(cu_seqlens, packed.device)
    if packed.shape[0] != requests:
        raise ValueError(f"packed must have a row for each of cu_seqlens' {requests} requests, got {packed.shape[0]}")
    shape = (checks.positive_int("total_tokens", total_tokens, or_zero=True), *packed.shape[2:])
    if out is None:
        stored = torch.uint8 if packed.dtype.itemsize == 1 else packed.dtype
        out = torch.zeros(shape, dtype=stored, device=packed.device).view(packed.dtype)
    else:
        checks.output("out", out, shape, (packed.dtype,), packed.device)
        checks.no_overlap("out", out, packed=packed)
    gradients.warn_if_dropped(UNPACK, packed)
    backend = dispatch.select(dispatch.CallSpec(UNPACK, packed.device, packed.dtype), backend)
    if out.numel() and packed.numel():
        _unpack_seq(_storage(rows), cu_seqlens, _storage(_rows("out", out, 1)), backend)
    return out


@register_op(UNPACK, mutates=("out",))
@dispatch.implemented(UNPACK, portable=refusals.triton)
def _unpack_seq(packed: torch.Tensor, cu_seqlens: torch.Tensor, out: torch.Tensor, backend: str) -> None:
    if backend == "portable":
        from flashlatte.ops.pack_seq.portable import unpack_seq
    else:
        from flashlatte.ops.pack_seq.reference import unpack_seq

    unpack_seq(packed, cu_seqlens, out)


def _rows(name: str, x: torch.Tensor, axes: int) -> torch.Tensor:
    """x with the axes after the first ``axes`` flattened to one of stride 1."""
    x = checks.given(name, x)
    if x.dtype not in DTYPES:
        raise TypeError(f"{name} must be {checks.dtype_names(DTYPES)}, got {checks.dtype_names([x.dtype])}")
    if x.dim() <= axes or 0 in x.shape[axes:]:
        raise ValueError(f"{name} must have non-empty axes after its first {axes}, got shape {list(x.shape)}")
    try:
        rows = x.view(*x.shape[:axes], math.prod(x.shape[axes:]))
    except RuntimeError:
        rows = None
    if rows is None or (rows.shape[-1] > 1 and rows.stride(-1) != 1 and rows.numel() > 0):
        raise ValueError(f"{name} must have contiguous tokens, got strides {x.stride()}")
    return rows


def _check_boundaries(cu_seqlens: torch.Tensor, device: torch.device) -> int:
    """The number of requests."""
    checks.indices("cu_seqlens", cu_seqlens, ("b + 1",), device)
    return cu_seqlens.shape[0] - 1


def _storage(x: torch.Tensor) -> torch.Tensor:
    """One-byte dtypes as uint8: torch.library.opcheck does not support float8."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


@functools.lru_cache(maxsize=64)
def _bits(text: str, dtype: torch.dtype) -> int:
    """The bytes of the number ``float.fromhex(text)``, repeated to four bytes."""
    value = float.fromhex(text)
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    is_special = dtype.is_floating_point and not math.isfinite(value)
    is_inside = limits.min <= value <= limits.max and (dtype.is_floating_point or value.is_integer())
    if not is_special and not is_inside:
        raise ValueError(f"pad_value must be representable in {checks.dtype_names([dtype])}, got {value}")
    if dtype == torch.float8_e4m3fn and math.isinf(value):
        value = math.nan  # PyTorch 2.13 casts an infinity to 448
    one = torch.tensor([value], dtype=torch.float64, device="cpu").to(dtype)
    return int(one.view(torch.uint8).repeat(4 // dtype.itemsize).view(torch.int32).item())
