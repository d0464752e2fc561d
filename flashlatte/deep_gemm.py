"""DeepGEMM's functions for index logits, argument for argument: ``import flashlatte.deep_gemm as deep_gemm``.

Both its earlier forms (``fp8_mqa_logits``, ``fp8_paged_mqa_logits``) and the present ones (``fp8_fp4_…``, whose q is a
tuple). What DeepGEMM refuses only because its kernels cannot is accepted: any number of heads to 128, any page size.

``python -m flashlatte.deep_gemm --install-alias DIR`` writes a package ``deep_gemm`` into DIR that forwards to this
module, for programs that import the top-level name. It has these functions only, none of DeepGEMM's matrix products.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from flashlatte.kv_cache import fp4
from flashlatte.ops.index_logits import index_logits, paged_index_logits
from flashlatte.ops.index_logits.api import LOGIT_DTYPES
from flashlatte.runtime import alias, checks, machine

__all__ = [
    "fp8_fp4_mqa_logits",
    "fp8_fp4_paged_mqa_logits",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "get_num_sms",
    "get_paged_mqa_logits_metadata",
    "set_num_sms",
]

ALIAS = '''"""DeepGEMM's functions for index logits, served by FlashLatte."""

from flashlatte.deep_gemm import *  # noqa: F403
'''
ALIAS_FILES = {"__init__.py": ALIAS}

# Of the values that four scales are for.
_MXFP4_BYTES = 4 * fp4.TILE // 2

Query = tuple[torch.Tensor, torch.Tensor | None]


def fp8_mqa_logits(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
) -> torch.Tensor:
    """``fp8_fp4_mqa_logits`` of float8_e4m3fn queries ``q`` [M, H, D], without a tuple, and with float32 logits."""
    return fp8_fp4_mqa_logits((q, None), kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits, max_seqlen_k)


def fp8_fp4_mqa_logits(
    q: Query,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
    logits_dtype: torch.dtype = torch.float32,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """Logits of queries against contiguous index keys, each against a range of its own.

    Args:
        q: (values, scales). fp8: float8_e4m3fn [M, H, D] and None; mxfp4: one-byte [M, H, 64] and int32 [M, H], four
            E8M0 scales in each.
        kv: (values, scales). fp8: float8_e4m3fn [N, D] and float32 [N]; mxfp4: one-byte [N, 64] and int32 [N].
        weights: float32 or bf16 [M, H].
        cu_seq_len_k_start, cu_seq_len_k_end: int32 [M], each query's keys.
        clean_logits: put -inf where a query has no key; what stands there is undefined otherwise.
        max_seqlen_k: above 0, rows are compressed: [M, max_seqlen_k], each from its query's first key.
        logits_dtype: float32 or bf16.
        backend: "hopper", "portable" or "reference"; None chooses.

    Returns:
        [M, N], or [M, max_seqlen_k]; rows begin at multiples of 128 bytes.

    Raises:
        TypeError, ValueError: arguments of a wrong type, dtype, shape or device, or that contradict each other.
    """
    _check_dtype(logits_dtype)
    _check_pair("kv", kv)
    k, k_scale = kv
    values = _query(q)
    if k.dtype.itemsize == 1 and k.dtype != torch.float8_e4m3fn:
        k, k_scale = k.view(torch.uint8), _scale_bytes("kv", k_scale)
    max_seqlen_k = checks.positive_int("max_seqlen_k", max_seqlen_k, or_zero=True)
    width = max_seqlen_k or (k.shape[0] if isinstance(k, torch.Tensor) and k.dim() else 0)
    names = {"k": "kv[0]", "k_scale": "kv[1]", "key_start": "cu_seq_len_k_start", "key_end": "cu_seq_len_k_end"}
    with checks.naming(**names, clean="clean_logits"):
        return index_logits(
            values,
            k,
            _weights(weights),
            cu_seq_len_k_start,
            cu_seq_len_k_end,
            k_scale=k_scale,
            clean=clean_logits,
            max_keys=max_seqlen_k or None,
            dtype=logits_dtype,
            out=_aligned_rows(values.shape[:1], width, logits_dtype, values.device),
            backend=backend,
        )


def fp8_paged_mqa_logits(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor | None,
    max_context_len: int,
    clean_logits: bool = False,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """``fp8_fp4_paged_mqa_logits`` of float8_e4m3fn queries ``q`` [b, next_n, H, D], without a tuple, and with float32
    logits."""
    return fp8_fp4_paged_mqa_logits(
        (q, None),
        kv_cache,
        weights,
        context_lens,
        block_table,
        schedule_meta,
        max_context_len,
        clean_logits,
        indices=indices,
    )


def fp8_fp4_paged_mqa_logits(
    q: Query,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor | None,
    max_context_len: int,
    clean_logits: bool = False,
    logits_dtype: torch.dtype = torch.float32,
    indices: torch.Tensor | None = None,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """Logits of queries against a paged cache of index keys.

    Args:
        q: (values, scales). fp8: float8_e4m3fn [b, next_n, H, D] and None; mxfp4: one-byte [b, next_n, H, 64] and
            int32 [b, next_n, H].
        kv_cache: uint8 [pages, page_size, 1, width], width D + 4 (fp8) or 68 (mxfp4).
        weights: float32 or bf16 [b · next_n, H].
        context_lens: int32 [b], of which token t sees the first context_lens - next_n + t + 1 keys; or [b, next_n].
        block_table: int32 [b, max_pages].
        schedule_meta: no use here; what ``get_paged_mqa_logits_metadata`` returned, or None.
        max_context_len: columns of the result.
        clean_logits: put -inf where a query has no key; what stands there is undefined otherwise.
        logits_dtype: float32 or bf16.
        indices: no use here: DeepGEMM's hint at which rows share a request.
        backend: "hopper", "portable" or "reference"; None chooses.

    Returns:
        [b · next_n, max_context_len]; rows begin at multiples of 128 bytes.

    Raises:
        TypeError, ValueError: arguments of a wrong type, dtype, shape or device, or that contradict each other.
    """
    _check_dtype(logits_dtype)
    max_context_len = checks.positive_int("max_context_len", max_context_len)
    values = _query(q)
    with checks.naming(cache="kv_cache", cache_seqlens="context_lens", clean="clean_logits"):
        return paged_index_logits(
            values,
            kv_cache,
            _weights(weights),
            context_lens,
            block_table,
            max_keys=max_context_len,
            clean=clean_logits,
            dtype=logits_dtype,
            out=_aligned_rows(values.shape[:2], max_context_len, logits_dtype, values.device),
            backend=backend,
        )


def get_paged_mqa_logits_metadata(
    context_lens: torch.Tensor, block_kv: int, num_sms: int, indices: torch.Tensor | None = None
) -> torch.Tensor:
    """Zeros of the shape of DeepGEMM's schedule, int32 [num_sms + 1, 2]: work is split in the call itself.

    They lie on the device of ``context_lens``; ``block_kv`` and ``indices`` are of no use here.

    Raises:
        TypeError, ValueError: ``context_lens`` that is no tensor, or a num_sms below 1.
    """
    device = checks.given("context_lens", context_lens).device
    return torch.zeros(checks.positive_int("num_sms", num_sms) + 1, 2, dtype=torch.int32, device=device)


def get_num_sms() -> int:
    """SMs of the current GPU; where there is none, the few that the CPU is taken to have."""
    has_gpu = torch.cuda.is_available()
    return machine.num_sms(torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu"))


def set_num_sms(num_sms: int) -> None:
    """Without effect: kernels take the whole GPU."""


def _query(q: Query) -> torch.Tensor:
    """float8_e4m3fn values, or mxfp4 ones as bf16, which holds them exactly."""
    _check_pair("q", q)
    values, scales = q
    if scales is None:
        return values
    bytes_of_scales = _scale_bytes("q", scales)
    if values.dtype.itemsize != 1 or values.shape != (*bytes_of_scales.shape[:-1], _MXFP4_BYTES):
        raise ValueError(
            f"q must be one-byte values [..., H, {_MXFP4_BYTES}] with int32 scales [..., H], got "
            f"{checks.dtype_names([values.dtype])} {list(values.shape)} with {list(scales.shape)}"
        )
    return fp4.dequantize_mxfp4(values.view(torch.uint8), bytes_of_scales).to(torch.bfloat16)


def _weights(weights: torch.Tensor) -> torch.Tensor:
    """In float32, which bf16 ones are exactly."""
    is_bf16 = isinstance(weights, torch.Tensor) and weights.dtype == torch.bfloat16
    return weights.float() if is_bf16 else weights


def _aligned_rows(rows: Sequence[int], width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    """An output whose rows begin at multiples of 128 bytes, which top-k kernels ask for; None if they do anyway."""
    align = 128 // dtype.itemsize
    if width % align == 0:
        return None
    return torch.empty(math.prod(rows), -(-width // align) * align, dtype=dtype, device=device)[:, :width]


def _check_dtype(logits_dtype: object) -> None:
    if not isinstance(logits_dtype, torch.dtype) or logits_dtype not in LOGIT_DTYPES:
        raise TypeError(f"logits_dtype must be {checks.dtype_names(LOGIT_DTYPES)}, got {logits_dtype}")


def _check_pair(name: str, value: object) -> None:
    if not isinstance(value, (tuple, list)) or len(value) != 2 or not isinstance(value[0], torch.Tensor):
        raise TypeError(f"{name} must be a tuple (values, scales), got {type(value).__name__}")


def _scale_bytes(name: str, scales: object) -> torch.Tensor:
    """uint8 [..., 4] of int32 [...]."""
    if not isinstance(scales, torch.Tensor) or scales.dtype != torch.int32:
        got = checks.dtype_names([scales.dtype]) if isinstance(scales, torch.Tensor) else type(scales).__name__
        raise TypeError(f"{name} of mxfp4 values must have int32 scales, four E8M0 bytes in each, got {got}")
    return scales.contiguous().unsqueeze(-1).view(torch.uint8)


def install_alias(directory: Path) -> Path:
    """Write the package ``deep_gemm`` into a directory; returns its path. Refuses to replace another ``deep_gemm``."""
    return alias.install(directory, "deep_gemm", ALIAS_FILES)


def main(argv: list[str] | None = None) -> int:
    return alias.main("flashlatte.deep_gemm", (__doc__ or "").split("\n")[0], "deep_gemm", ALIAS_FILES, argv)


if __name__ == "__main__":
    sys.exit(main())
