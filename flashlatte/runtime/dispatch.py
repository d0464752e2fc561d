"""Which implementation serves an operation on this machine, and why the others do not.

An operation ``define``s its implementations, best first, each with a function that tells why it cannot serve a call
(``refusals`` has the common reasons). ``select`` takes the first that can, or the one that the caller named;
``explain`` tells for each why it was passed over. An implementation's module is imported when it first runs, so that
the reference needs neither Triton nor a GPU.

Anybody can ``register`` one more for an operation that exists; it comes before the operation's own:

>>> def refuses(call):
...     return None if call.page_size == 16 else f"takes pages of 16 tokens, not {call.page_size}"
>>> register("dense_decode", Implementation("mine", "my_package.decode:run", refuses))
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flashlatte.runtime import repeat

BACKENDS = ("hopper", "portable", "reference")


@dataclass(frozen=True)
class Call:
    """What the choice of an implementation depends on. Facts that an operation has no use for stay None."""

    operation: str
    device: torch.device
    dtype: torch.dtype
    cache_format: str | None = None
    page_size: int | None = None
    head_dim: int | None = None
    head_dim_v: int | None = None
    h_q: int | None = None
    h_kv: int | None = None
    # Of a selection: rows, their columns, and how many of those are chosen.
    rows: int | None = None
    columns: int | None = None
    k: int | None = None
    # Whether the rows of every operand that is copied many bytes at a time, as by TMA, are aligned for that.
    rows_aligned: bool = True
    # Whether pages that are copied whole lie in one piece each, in memory that the device can address.
    pages_reachable: bool = True
    # Of a second cache beside the first.
    extra_cache_format: str | None = None
    # Of the larger of both caches: its tokens, and the most bytes from page to page or from token to token.
    slots: int | None = None
    stride_bytes: int | None = None
    # What the call asks for that not every implementation has, in words.
    asks_for: str | None = None


def serves_all(call: Call) -> str | None:
    """The ``refuses`` of an implementation that takes every call."""
    return None


@dataclass(frozen=True)
class Implementation:
    """One way to run an operation.

    Attributes:
        backend: its name: one of ``BACKENDS``, or one of its own.
        target: "module:function", imported when first run. The function takes what the operation's other
            implementations take.
        refuses: why it cannot serve a call, in words that follow "it ", or None if it can.
    """

    backend: str
    target: str
    refuses: Callable[[Call], str | None] = serves_all

    def __post_init__(self) -> None:
        if not self.backend.isidentifier():
            raise ValueError(f"backend must be a name of letters, digits and underscores, got {self.backend!r}")
        module, _, function = self.target.partition(":")
        if not module or not function:
            raise ValueError(f"target must be 'module:function', got {self.target!r}")


@dataclass(frozen=True)
class Choice:
    """An implementation considered for a call. ``refusal`` is None if it can serve the call."""

    backend: str
    refusal: str | None


_REGISTRY: dict[str, dict[str, Implementation]] = {}


def define(operation: str, *implementations: Implementation) -> None:
    """State an operation and its implementations, best first."""
    _REGISTRY[operation] = {known.backend: known for known in implementations}
    _forget()


def register(operation: str, *implementations: Implementation) -> None:
    """Add implementations, the best first, before those there are. One of a known name takes the other's place.

    Raises:
        ValueError: an operation that does not exist, or whose module is not imported.
    """
    if operation not in _REGISTRY:
        names = ", ".join(operations()) or "none yet"
        raise ValueError(f"operation must be one that is imported ({names}; ops.load() imports all), got {operation!r}")
    known = _REGISTRY[operation]
    new = {added.backend: added for added in implementations}
    ahead = {name: added for name, added in new.items() if name not in known}
    _REGISTRY[operation] = ahead | {name: new.get(name, old) for name, old in known.items()}
    _forget()


def operations() -> tuple[str, ...]:
    """The names of all operations whose modules are imported."""
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
            if candidate.refuses(call) is None:
                return name
        reasons = "; ".join(f"{choice.backend} {choice.refusal}" for choice in explain(call))
        raise ValueError(f"no implementation of {call.operation} can serve this call: {reasons}")
    if not isinstance(backend, str) or (backend not in known and backend not in BACKENDS):
        raise ValueError(f"backend must be one of {', '.join(_names(call.operation))} or None, got {backend!r}")
    refusal = _refusal(call, backend)
    if refusal is not None:
        raise ValueError(f"backend={backend!r} cannot serve this call of {call.operation}: it {refusal}")
    return backend


def explain(call: Call) -> list[Choice]:
    """For every backend, best first, whether it can serve the call and if not, why."""
    return [Choice(name, _refusal(call, name)) for name in _names(call.operation)]


@functools.cache
def implementation(operation: str, backend: str) -> Callable[..., Any]:
    """The function that runs an operation on a backend that ``select`` returned."""
    module, _, function = _REGISTRY[operation][backend].target.partition(":")
    return getattr(importlib.import_module(module), function)


def _names(operation: str) -> tuple[str, ...]:
    """The operation's backends and those of ``BACKENDS`` that it lacks, best first."""
    own = tuple(name for name in _REGISTRY[operation] if name not in BACKENDS)
    return own + BACKENDS


def _refusal(call: Call, backend: str) -> str | None:
    candidate = _REGISTRY[call.operation].get(backend)
    return f"has no {call.operation} in this version" if candidate is None else candidate.refuses(call)


def _forget() -> None:
    """What was chosen or launched before might be chosen otherwise now."""
    implementation.cache_clear()
    repeat.forget()
