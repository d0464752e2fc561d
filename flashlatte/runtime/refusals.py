"""Common reasons for which an implementation refuses a call. Each function returns its reason, or None.

A reason follows "it ". An implementation's ``refuses`` joins those that it has with ``or``.
"""

from __future__ import annotations

import importlib.util

import torch

from flashlatte.runtime import machine
from flashlatte.runtime.checks import dtype_names, either
from flashlatte.runtime.dispatch import Call

_TRITON_INSTALLED = importlib.util.find_spec("triton") is not None
_INT32_LIMIT = 2**31


def dtype(call: Call, *accepted: torch.dtype) -> str | None:
    """The queries, or rows of a cache operation, are of another dtype."""
    if call.dtype in accepted:
        return None
    return f"takes {', '.join(dtype_names([one]) for one in accepted)}, not {dtype_names([call.dtype])}"


def triton(call: Call) -> str | None:
    """Triton does not run there."""
    if not _TRITON_INSTALLED:
        return "needs Triton, which is not installed"
    device_type = machine.device_type(call.device)
    if device_type == "cpu" and not machine.interpreting():
        return "runs on a GPU (or on the CPU in Triton's interpreter, with TRITON_INTERPRET=1)"
    if device_type not in ("cpu", "cuda", "xpu"):
        return f"runs on a GPU that Triton serves, not on {device_type}"
    return None


def capability(call: Call, major: int, minor: int) -> str | None:
    """The device is not a GPU of this compute capability, or Triton does not compile for it."""
    wanted = f"needs compute capability {major}.{minor}"
    if not _TRITON_INSTALLED:
        return "needs Triton, which is not installed"
    if machine.interpreting():
        return f"{wanted}, which Triton's interpreter (TRITON_INTERPRET=1) is not"
    if machine.device_type(call.device) != "cuda" or torch.version.hip is not None:
        return f"{wanted} (an NVIDIA GPU), and the tensors are on {call.device}"
    found = machine.compute_capability(call.device)
    return None if found == (major, minor) else f"{wanted}, and {call.device} has {found[0]}.{found[1]}"


def head_dims(call: Call, *accepted: tuple[int, int]) -> str | None:
    """The head dims of keys and values are another pair."""
    if (call.head_dim, call.head_dim_v) in accepted:
        return None
    if any(call.head_dim in (None, keys) and call.head_dim_v in (None, values) for keys, values in accepted):
        return None
    pairs = either(f"{keys} with {values}" for keys, values in accepted)
    return f"takes head dims {pairs}, not {call.head_dim} with {call.head_dim_v}"


def head_dim_in(call: Call, accepted: range) -> str | None:
    """A head dim, of keys or of values, is not of this range."""
    other = next((one for one in (call.head_dim, call.head_dim_v) if one is not None and one not in accepted), None)
    if other is None:
        return None
    return f"takes head dims from {accepted[0]} to {accepted[-1]} by {accepted.step}, not {other}"


def too_wide(call: Call, most: int) -> str | None:
    """A head dim, of keys or of values, is above ``most``."""
    widest = max(call.head_dim or 0, call.head_dim_v or 0)
    return None if widest <= most else f"takes head dims up to {most}, not {widest}"


def page_size(call: Call, multiple: int) -> str | None:
    """Pages are not of a multiple of so many tokens."""
    if call.page_size is None or call.page_size % multiple == 0:
        return None
    return f"takes pages of a multiple of {multiple} tokens, not {call.page_size}"


def cache_size(call: Call) -> str | None:
    """A cache's tokens are too many, or its pages too far apart, for the int32 numbers of a kernel."""
    if (call.slots or 0) >= _INT32_LIMIT:
        return f"takes caches of less than {_INT32_LIMIT} tokens, not {call.slots}"
    if (call.stride_bytes or 0) >= _INT32_LIMIT:
        return f"takes caches whose pages and tokens are less than {_INT32_LIMIT} bytes apart, not {call.stride_bytes}"
    return None


def unaligned(call: Call, alignment: int = 16) -> str | None:
    """Rows do not begin at multiples of so many bytes."""
    return None if call.rows_aligned else f"takes tensors whose rows begin at multiples of {alignment} bytes"
