"""Which implementation serves an operation on this machine, and why the others do not.

Each operation, and each choice that a layer makes, registers its implementations. An implementation states what it
serves; ``select`` takes the best that serves a call, or the one the caller named, and ``explain`` tells for each why it
was passed over. An implementation's module is imported when it first runs, so that the reference needs neither Triton
nor a GPU.

Anybody can register one, for an operation that exists or a new one:

>>> register("dense_decode", Implementation("mine", "my_package.decode:run", (torch.bfloat16,), page_multiple=16))
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from flashlatte.runtime import repeat

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
    # Whether the rows of every operand that is copied 16 bytes at a time, as by TMA, begin at multiples of 16 bytes, or
    # where records hold scales, of 4 (``row_alignment``).
    rows_aligned: bool = True
    # Whether each query attends to tokens that were selected for it.
    sparse: bool | None = None
    # Whether there are attention sinks.
    sinks: bool = False


@dataclass(frozen=True)
class Implementation:
    """One way to run an operation, by what it serves. A need that is None, and a field of a call that is, match all.

    Attributes:
        backend: its name: one of ``BACKENDS``, or one of its own. Names of their own come before ``BACKENDS``, the
            first registered first.
        target: "module:function", imported when first run. The function takes what the operation's other
            implementations take.
        dtypes: accepted dtypes of the queries (or of the rows, for cache operations).
        needs_triton: compiled by Triton: runs on a GPU, or on the CPU under Triton's interpreter.
        capability: required compute capability.
        refuses: further conditions; returns the reason for a refusal, or None.
        cache_formats: names of the cache formats it reads or writes.
        page_multiple: what page sizes must be multiples of.
        head_dims: pairs of head dim and value's head dim.
        max_head_dim: the widest head dim, of values too.
        heads: numbers of query heads.
        kv_heads: numbers of key heads.
        aligned_rows: whether rows must begin at multiples of ``row_alignment`` bytes.
        sparse: whether it is for selected tokens (True) or for all (False).
        sinks: whether it takes attention sinks.
    """

    backend: str
    target: str
    dtypes: tuple[torch.dtype, ...]
    needs_triton: bool = False
    capability: tuple[int, int] | None = None
    refuses: Callable[[Call], str | None] | None = None
    cache_formats: tuple[str, ...] | None = None
    page_multiple: int | None = None
    head_dims: tuple[tuple[int, int], ...] | None = None
    max_head_dim: int | None = None
    heads: tuple[int, ...] | None = None
    kv_heads: tuple[int, ...] | None = None
    aligned_rows: bool = False
    sparse: bool | None = None
    sinks: bool = True

    _needs: tuple[Callable[[Implementation, Call], str | None], ...] = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        # The checks of what it states: most state little, and a call should cost little.
        needs = tuple(check for name, check in _CHECKS.items() if getattr(self, name) != _UNSTATED[name])
        object.__setattr__(self, "_needs", needs)

    def refusal(self, call: Call) -> str | None:
        """Why this implementation cannot serve the call, or None if it can."""
        if call.dtype not in self.dtypes:
            accepted = ", ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
            return f"takes {accepted}, not {str(call.dtype).removeprefix('torch.')}"
        if self.needs_triton and (reason := _triton_refusal(call.device.type)):
            return reason
        if self.capability is not None and (reason := _capability_refusal(call.device, self.capability)):
            return reason
        for need in self._needs:
            if (reason := need(self, call)) is not None:
                return reason
        return self.refuses(call) if self.refuses is not None else None


def _wrong_format(needs: Implementation, call: Call) -> str | None:
    if call.cache_format is None or call.cache_format in (needs.cache_formats or ()):
        return None
    return f"takes caches in {_either(needs.cache_formats or ())}, not {call.cache_format}"


def _wrong_pages(needs: Implementation, call: Call) -> str | None:
    if call.page_size is None or call.page_size % (needs.page_multiple or 1) == 0:
        return None
    return f"takes pages of a multiple of {needs.page_multiple} tokens, not {call.page_size}"


def _wrong_head_dims(needs: Implementation, call: Call) -> str | None:
    pairs = needs.head_dims or ()
    if any(call.head_dim in (None, first) and call.head_dim_v in (None, second) for first, second in pairs):
        return None
    accepted = _either(f"{first} with {second}" for first, second in pairs)
    return f"takes head dims {accepted}, not {call.head_dim} with {call.head_dim_v}"


def _too_wide(needs: Implementation, call: Call) -> str | None:
    widest, limit = max(call.head_dim or 0, call.head_dim_v or 0), needs.max_head_dim or 0
    return None if widest <= limit else f"takes head dims up to {limit}, not {widest}"


def _wrong_heads(needs: Implementation, call: Call) -> str | None:
    if call.h_q is None or call.h_q in (needs.heads or ()):
        return None
    return f"takes {_either(needs.heads or ())} query heads, not {call.h_q}"


def _wrong_kv_heads(needs: Implementation, call: Call) -> str | None:
    if call.h_kv is None or call.h_kv in (needs.kv_heads or ()):
        return None
    return f"takes {_either(needs.kv_heads or ())} key heads, not {call.h_kv}"


def _unaligned(needs: Implementation, call: Call) -> str | None:
    if call.rows_aligned:
        return None
    return f"takes tensors whose rows begin at multiples of {row_alignment(call.cache_format)} bytes"


def _wrong_sparsity(needs: Implementation, call: Call) -> str | None:
    if call.sparse is None or call.sparse == needs.sparse:
        return None
    return "is for tokens that indices select" if needs.sparse else "is for all tokens, not for selected ones"


def _sinks(needs: Implementation, call: Call) -> str | None:
    return "takes no attention sinks" if call.sinks else None


def row_alignment(cache_format: str | None) -> int:
    """What rows must begin at multiples of for an implementation with ``aligned_rows``, in bytes."""
    return 4 if cache_format in ("v32", "model1") else 16


def _either(values: Iterable[object]) -> str:
    *first, last = map(str, values)
    return f"{', '.join(first)} or {last}" if first else last


_CHECKS: dict[str, Callable[[Implementation, Call], str | None]] = {
    "cache_formats": _wrong_format,
    "page_multiple": _wrong_pages,
    "head_dims": _wrong_head_dims,
    "max_head_dim": _too_wide,
    "heads": _wrong_heads,
    "kv_heads": _wrong_kv_heads,
    "aligned_rows": _unaligned,
    "sparse": _wrong_sparsity,
    "sinks": _sinks,
}
_UNSTATED = {field.name: field.default for field in dataclasses.fields(Implementation)}


@dataclass(frozen=True)
class Choice:
    """An implementation considered for a call. ``refusal`` is None if it can serve the call."""

    backend: str
    refusal: str | None


_REGISTRY: dict[str, dict[str, Implementation]] = {}


def register(operation: str, *implementations: Implementation) -> None:
    """Register implementations of an operation. One of a name that it has already takes the other's place.

    Raises:
        ValueError: a backend without a name, or a target that is not "module:function".
    """
    known = _REGISTRY.get(operation, {})
    for new in implementations:
        if not new.backend or not new.backend.isidentifier():
            raise ValueError(f"backend must be a name of letters, digits and underscores, got {new.backend!r}")
        module, _, function = new.target.partition(":")
        if not module or not function:
            raise ValueError(f"target must be 'module:function', got {new.target!r}")
        known = known | {new.backend: new}
    own = [name for name in known if name not in BACKENDS]
    _REGISTRY[operation] = {name: known[name] for name in (*own, *BACKENDS) if name in known}
    implementation.cache_clear()
    repeat.forget()


def operations() -> tuple[str, ...]:
    """The names of all registered operations."""
    return tuple(sorted(_REGISTRY))


def backends() -> tuple[str, ...]:
    """The names of ``BACKENDS`` and of all that others registered."""
    others = (name for known in _REGISTRY.values() for name in known)
    return tuple(dict.fromkeys((*BACKENDS, *others)))


def select(call: Call, backend: str | None = None) -> str:
    """The backend that runs ``call``: the named one, or the best that can.

    Raises:
        ValueError: the named backend does not exist or cannot serve the call (with its reason), or, without a
            name, none can.
    """
    known = _REGISTRY[call.operation]
    if backend is None:
        for name, candidate in known.items():
            if candidate.refusal(call) is None:
                return name
        reasons = "; ".join(f"{choice.backend} {choice.refusal}" for choice in explain(call))
        raise ValueError(f"no implementation of {call.operation} can serve this call: {reasons}")
    if backend not in known and backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(_names(call.operation))} or None, got {backend!r}")
    refusal = _refusal(call, backend)
    if refusal is not None:
        raise ValueError(f"backend={backend!r} cannot serve this call of {call.operation}: it {refusal}")
    return backend


def explain(call: Call) -> list[Choice]:
    """For every backend, best first, whether it can serve the call and if not, why."""
    return [Choice(name, _refusal(call, name)) for name in _names(call.operation)]


def _names(operation: str) -> tuple[str, ...]:
    """The operation's backends, best first, with those of ``BACKENDS`` that it lacks, if it has any of them."""
    own = tuple(name for name in _REGISTRY[operation] if name not in BACKENDS)
    return own if len(own) == len(_REGISTRY[operation]) else own + BACKENDS


def _refusal(call: Call, backend: str) -> str | None:
    candidate = _REGISTRY[call.operation].get(backend)
    if candidate is None:
        return f"has no {call.operation} in this version"
    return candidate.refusal(call)


@functools.cache
def implementation(operation: str, backend: str) -> Callable[..., Any]:
    """The function that runs an operation on a backend that ``select`` returned."""
    module, _, function = _REGISTRY[operation][backend].target.partition(":")
    return getattr(importlib.import_module(module), function)


def compute_capability(device: torch.device) -> tuple[int, int]:
    return _compute_capability(device)


# What torch.compiler.assume_constant_result sets; calling it imports torch._dynamo, which takes as long as torch.
compute_capability._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


@functools.cache
def _compute_capability(device: torch.device) -> tuple[int, int]:
    """(0, 0) where there is no GPU, as with fake tensors of one."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (0, 0)


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
    if interpreting():
        return f"{wanted}, which Triton's interpreter (TRITON_INTERPRET=1) is not"
    if device.type != "cuda" or torch.version.hip is not None:
        return f"{wanted} (an NVIDIA GPU), and the tensors are on {device}"
    major, minor = compute_capability(device)
    if (major, minor) != required:
        return f"{wanted}, and {device} has {major}.{minor}"
    return None
