"""Common reasons why an implementation does not accept a call. Each function returns a reason, or None.

A reason continues a sentence that begins with "it ". An implementation's ``refuses`` joins its checks with ``or``.
"""

from __future__ import annotations

import importlib.util

import torch

from flashlatte.runtime import machine
from flashlatte.runtime.checks import dtype_names, join_or
from flashlatte.runtime.dispatch import CallSpec

_TRITON_INSTALLED = importlib.util.find_spec("triton") is not None
_INT32_LIMIT = 2**31


def dtype(call: CallSpec, *accepted: torch.dtype) -> str | None:
    """The dtype of the queries, or of a cache operation's rows, is not one of ``accepted``."""
    if call.dtype in accepted:
        return None
    return f"takes {', '.join(dtype_names([one]) for one in accepted)}, not {dtype_names([call.dtype])}"


def triton(call: CallSpec) -> str | None:
    """Triton does not run on the call's device."""
    if not _TRITON_INSTALLED:
        return "needs Triton, which is not installed"
    device_type = machine.device_type(call.device)
    if device_type == "cpu" and not machine.interpreting():
        return "runs on a GPU (or on the CPU in Triton's interpreter, with TRITON_INTERPRET=1)"
    if device_type not in ("cpu", "cuda", "xpu"):
        return f"runs on a GPU that Triton serves, not on {device_type}"
    return None


def triton_attention(call: CallSpec, max_head_dim: int) -> str | None:
    """Attention in Triton cannot run the call: it takes 16-bit queries, and head dims up to a maximum."""
    return dtype(call, torch.bfloat16, torch.float16) or triton(call) or head_dim_above(call, max_head_dim)


def hopper(call: CallSpec) -> str | None:
    """The device is not a GPU of compute capability 9.0, or Triton does not compile for it."""
    wanted = "needs compute capability 9.0"
    if not _TRITON_INSTALLED:
        return "needs Triton, which is not installed"
    if machine.interpreting():
        return f"{wanted} and does not run in Triton's interpreter (TRITON_INTERPRET=1)"
    if machine.device_type(call.device) != "cuda" or torch.version.hip is not None:
        return f"{wanted} (an NVIDIA GPU), and the tensors are on {call.device}"
    major, minor = machine.compute_capability(call.device)
    return None if (major, minor) == (9, 0) else f"{wanted}, and {call.device} has {major}.{minor}"


def head_dims(call: CallSpec, *accepted: tuple[int, int]) -> str | None:
    """The head dims of keys and values are not one of the ``accepted`` pairs."""
    if (call.head_dim, call.head_dim_v) in accepted:
        return None
    if any(call.head_dim in (None, keys) and call.head_dim_v in (None, values) for keys, values in accepted):
        return None
    pairs = join_or(f"{keys} with {values}" for keys, values in accepted)
    return f"takes head dims {pairs}, not {call.head_dim} with {call.head_dim_v}"


def head_dim_in(call: CallSpec, accepted: range) -> str | None:
    """A head dim, of keys or of values, is not in a range."""
    other = next((one for one in (call.head_dim, call.head_dim_v) if one is not None and one not in accepted), None)
    if other is None:
        return None
    return f"takes head dims from {accepted[0]} to {accepted[-1]} by {accepted.step}, not {other}"


def head_dim_above(call: CallSpec, maximum: int) -> str | None:
    """A head dim, of keys or of values, is above ``maximum``."""
    largest = max(call.head_dim or 0, call.head_dim_v or 0)
    return None if largest <= maximum else f"takes head dims up to {maximum}, not {largest}"


def page_size(call: CallSpec, multiple: int) -> str | None:
    """The page size is not a multiple of ``multiple`` tokens."""
    if call.page_size is None or call.page_size % multiple == 0:
        return None
    return f"takes pages of a multiple of {multiple} tokens, not {call.page_size}"


def cache_size(call: CallSpec) -> str | None:
    """The number of slots of a cache, or its page or token stride in bytes, does not fit int32."""
    if (call.slots or 0) >= _INT32_LIMIT:
        return f"takes caches of less than {_INT32_LIMIT} tokens, not {call.slots}"
    if (call.stride_bytes or 0) >= _INT32_LIMIT:
        return f"takes caches whose pages and tokens are less than {_INT32_LIMIT} bytes apart, not {call.stride_bytes}"
    return None


def unaligned(call: CallSpec, alignment: int = 16) -> str | None:
    """Rows do not begin at multiples of ``alignment`` bytes."""
    return None if call.rows_aligned else f"takes tensors whose rows begin at multiples of {alignment} bytes"
