"""Which implementation serves an operation on this machine, and why the others do not.

Each operation registers its implementations, best first. An implementation says what it needs; ``select`` takes
the first whose needs a call meets, or the one the caller named, and ``explain`` tells for each why it was passed
over. An implementation's module is imported when it first runs, so that the reference needs neither Triton nor a
GPU.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

BACKENDS = ("hopper", "portable", "reference")


@dataclass(frozen=True)
class Call:
    """What the choice of an implementation depends on. Fields that an operation has no use for stay None."""

    operation: str
    device: torch.device
    dtype: torch.dtype
    cache_format: str | None = None
    page_size: int | None = None
    head_dim: int | None = None
    head_dim_v: int | None = None
    h_q: int | None = None
    h_kv: int | None = None
    # Whether the rows of every operand that is copied 16 bytes at a time, as by TMA, begin at multiples of 16 bytes.
    rows_aligned: bool = True


@dataclass(frozen=True)
class Implementation:
    """One way to run an operation.

    Attributes:
        backend: one of ``BACKENDS``.
        target: "module:function", imported when first run.
        dtypes: accepted dtypes of the queries (or of the rows, for cache operations).
        needs_triton: compiled by Triton: runs on a GPU, or on the CPU under Triton's interpreter.
        capability: required compute capability, or None for any.
        refuses: further conditions; returns the reason for a refusal, or None.
    """

    backend: str
    target: str
    dtypes: tuple[torch.dtype, ...]
    needs_triton: bool = False
    capability: tuple[int, int] | None = None
    refuses: Callable[[Call], str | None] | None = None

    def refusal(self, call: Call) -> str | None:
        """Why this implementation cannot serve the call, or None if it can."""
        if call.dtype not in self.dtypes:
            accepted = ", ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
            return f"takes {accepted}, not {str(call.dtype).removeprefix('torch.')}"
        if self.needs_triton and (reason := _triton_refusal(call.device.type)):
            return reason
        if self.capability is not None and (reason := _capability_refusal(call.device, self.capability)):
            return reason
        return self.refuses(call) if self.refuses is not None else None


@dataclass(frozen=True)
class Choice:
    """An implementation considered for a call. ``refusal`` is None if it can serve the call."""

    backend: str
    refusal: str | None


_REGISTRY: dict[str, dict[str, Implementation]] = {}


def register(operation: str, *implementations: Implementation) -> None:
    """Register the implementations of an operation."""
    known = _REGISTRY.setdefault(operation, {})
    for implementation in implementations:
        if implementation.backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {implementation.backend!r}")
        known[implementation.backend] = implementation


def operations() -> tuple[str, ...]:
    """The names of all registered operations."""
    return tuple(sorted(_REGISTRY))


def select(call: Call, backend: str | None = None) -> str:
    """The backend that runs ``call``: the named one, or the best that can.

    Raises:
        ValueError: the named backend does not exist or cannot serve the call (with its reason), or, without a
            name, none can.
    """
    if backend is None:
        for name in BACKENDS:
            implementation = _REGISTRY[call.operation].get(name)
            if implementation is not None and implementation.refusal(call) is None:
                return name
        reasons = "; ".join(f"{choice.backend} {choice.refusal}" for choice in explain(call))
        raise ValueError(f"no implementation of {call.operation} can serve this call: {reasons}")
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)} or None, got {backend!r}")
    refusal = _refusal(call, backend)
    if refusal is not None:
        raise ValueError(f"backend={backend!r} cannot serve this call of {call.operation}: it {refusal}")
    return backend


def explain(call: Call) -> list[Choice]:
    """For every backend, best first, whether it can serve the call and if not, why."""
    return [Choice(name, _refusal(call, name)) for name in BACKENDS]


def _refusal(call: Call, backend: str) -> str | None:
    implementation = _REGISTRY[call.operation].get(backend)
    if implementation is None:
        return f"has no {call.operation} in this version"
    return implementation.refusal(call)


@functools.cache
def implementation(operation: str, backend: str) -> Callable[..., None]:
    """The function that runs an operation on a backend that ``select`` returned."""
    module, _, function = _REGISTRY[operation][backend].target.partition(":")
    return getattr(importlib.import_module(module), function)


@torch.compiler.assume_constant_result
@functools.cache
def compute_capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; on the CPU, where Triton's interpreter runs one program after the other, a few."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


_TRITON_INSTALLED = importlib.util.find_spec("triton") is not None
_INTERPRETING = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


def interpreting() -> bool:
    """Whether Triton kernels run in Triton's interpreter: settled by TRITON_INTERPRET when the kernels are imported."""
    return _INTERPRETING


def _triton_refusal(device_type: str) -> str | None:
    if not _TRITON_INSTALLED:
        return "needs Triton, which is not installed"
    if device_type == "cpu" and not interpreting():
        return "runs on a GPU (or on the CPU in Triton's interpreter, with TRITON_INTERPRET=1)"
    if device_type not in ("cpu", "cuda", "xpu"):
        return f"runs on a GPU that Triton serves, not on {device_type}"
    return None


def _capability_refusal(device: torch.device, required: tuple[int, int]) -> str | None:
    wanted = f"needs compute capability {required[0]}.{required[1]}"
    if device.type != "cuda" or torch.version.hip is not None:
        return f"{wanted} (an NVIDIA GPU), and the tensors are on {device}"
    major, minor = compute_capability(device)
    if (major, minor) != required:
        return f"{wanted}, and {device} has {major}.{minor}"
    return None
