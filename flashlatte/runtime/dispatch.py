"""The choice of the implementation that runs a call, and the reasons why the others cannot.

Each operation defines its implementations (``implemented``). ``select`` returns the best that accepts the call, or the
one that the caller named. ``explain`` returns the reason of each that does not accept it (``refusals`` has the common
reasons). A kernel is imported when it first runs, so the references need neither Triton nor a GPU.

``register`` adds an implementation to an existing operation, ahead of the operation's own:

>>> def load():
...     from my_package.decode import run
...     return run
>>> def refuses(call):
...     return None if call.page_size == 16 else f"takes pages of 16 tokens, not {call.page_size}"
>>> register("dense_decode", Implementation("mine", load, refuses))
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec

import torch

from flashlatte.runtime import machine, repeat

BACKENDS = ("hopper", "portable", "reference")

Function = Callable[..., Any]
_Args = ParamSpec("_Args")


@dataclass(frozen=True)
class CallSpec:
    """The properties of a call that determine its implementation; None: the operation does not have the property.

    Attributes:
        index_dim: head dim of the indexer, beside that of the attention.
        rows, columns, k: rows and columns of a selection's input, and the number of columns selected from each row.
        rows_aligned: the rows of all operands that are copied many bytes at a time (as by TMA) are aligned for it.
        pages_reachable: each page is contiguous, in memory that the device can address.
        extra_cache_format: format of a second cache.
        slots: tokens of the larger cache.
        stride_bytes: the greater of the larger cache's page stride and token stride, in bytes.
        optional_features: requested features that some implementation lacks, in words.
    """

    operation: str
    device: torch.device
    dtype: torch.dtype
    cache_format: str | None = None
    page_size: int | None = None
    head_dim: int | None = None
    head_dim_v: int | None = None
    index_dim: int | None = None
    h_q: int | None = None
    h_kv: int | None = None
    rows: int | None = None
    columns: int | None = None
    k: int | None = None
    rows_aligned: bool = True
    pages_reachable: bool = True
    extra_cache_format: str | None = None
    slots: int | None = None
    stride_bytes: int | None = None
    optional_features: str | None = None


def accepts_all(call: CallSpec) -> str | None:
    """The ``refuses`` of an implementation that accepts every call."""
    return None


# Why an implementation cannot run a call, in words that follow "it ", or None if it can.
Refuses = Callable[[CallSpec], str | None]


@dataclass(frozen=True)
class Implementation:
    """One way to run an operation.

    Attributes:
        backend: its name: one of ``BACKENDS``, or another identifier.
        load: imports and returns the function, which takes what the operation's other implementations take: a record
            of the checked arguments (``ops/<operation>/reference.py``). Called once, when it first runs.
        refuses: returns why the implementation cannot run a call, in words that follow "it ", or None if it can.
    """

    backend: str
    load: Callable[[], Function]
    refuses: Refuses = accepts_all

    def __post_init__(self) -> None:
        if not self.backend.isidentifier():
            raise ValueError(f"backend must be a name of letters, digits and underscores, got {self.backend!r}")
        if not callable(self.load):
            raise TypeError(f"load must be a function that returns the implementation, got {self.load!r}")


@dataclass(frozen=True)
class Choice:
    """An implementation considered for a call. ``refusal`` is None if it accepts the call."""

    backend: str
    refusal: str | None


_REGISTRY: dict[str, dict[str, Implementation]] = {}


def define(operation: str, *implementations: Implementation) -> None:
    """Define an operation by its implementations, best first."""
    _REGISTRY[operation] = {known.backend: known for known in implementations}
    repeat.forget()


def implemented(
    operation: str,
    *,
    portable: Refuses,
    hopper: Refuses | None = None,
) -> Callable[[Callable[_Args, None]], Callable[_Args, None]]:
    """Decorate the function of an operation that takes a call's arguments and ``backend``, and runs the implementation.

    The function imports the implementation of ``backend``, one of ``BACKENDS``, and calls it. The decorated function
    also runs the backends that ``register`` added.

    Args:
        portable, hopper: ``Implementation.refuses`` of each. None: the operation has no such implementation.
    """

    def decorate(function: Callable[_Args, None]) -> Callable[_Args, None]:
        def own(backend: str, refuses: Refuses) -> Implementation:
            run: Function = function

            def load() -> Function:
                if backend != "reference":
                    # Imports Triton. Kernels may import a module of Triton first, which in two threads would fail.
                    importlib.import_module("flashlatte.runtime.triton_kernel")
                return functools.partial(run, backend=backend)

            return Implementation(backend, load, refuses)

        best = () if hopper is None else (own("hopper", hopper),)
        define(operation, *best, own("portable", portable), own("reference", accepts_all))

        @functools.wraps(function)
        def run(*args: Any) -> None:
            *arguments, backend = args
            implementation(operation, backend)(*arguments)

        return run  # type: ignore[return-value]

    return decorate


def register(operation: str, *implementations: Implementation) -> None:
    """Add implementations, best first, ahead of the present ones. One with the name of a present one replaces it.

    Raises:
        ValueError: the operation does not exist, or its module is not imported.
    """
    if operation not in _REGISTRY:
        names = ", ".join(operations()) or "none yet"
        raise ValueError(f"operation must be one that is imported ({names}; ops.load() imports all), got {operation!r}")
    known = _REGISTRY[operation]
    new = {added.backend: added for added in implementations}
    ahead = {name: added for name, added in new.items() if name not in known}
    _REGISTRY[operation] = ahead | {name: new.get(name, old) for name, old in known.items()}
    repeat.forget()  # another implementation may run now


def operations() -> tuple[str, ...]:
    """The names of all operations whose modules are imported."""
    return tuple(sorted(_REGISTRY))


def backends() -> tuple[str, ...]:
    """``BACKENDS`` and the names of all registered backends."""
    # A copy, since another thread may import an operation.
    others = (name for known in _REGISTRY.copy().values() for name in known)
    return tuple(dict.fromkeys((*BACKENDS, *others)))


def select(call: CallSpec, backend: str | None = None) -> str:
    """The backend that runs ``call``: the given one, or the best that accepts the call.

    Raises:
        ValueError: the given backend does not exist or does not accept the call (with its reason); or, if none is
            given, no backend accepts it.
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
    if reason := refusal(call, backend):
        raise ValueError(f"backend={backend!r} cannot serve this call of {call.operation}: it {reason}")
    return backend


def select_kernel(call: CallSpec, backend: str | None = None) -> str:
    """As ``select``, but a call on a GPU runs the reference only if ``backend`` names it.

    For features that callers request for speed: the reference would take many times as long as a kernel without them.

    Raises:
        ValueError: as ``select``; or no backend is given, and no kernel on the call's device accepts it.
    """
    chosen = select(call, backend)
    if backend is None and chosen == "reference" and machine.device_type(call.device) not in ("cpu", "meta"):
        reasons = "; ".join(f"{choice.backend} {choice.refusal}" for choice in explain(call) if choice.refusal)
        raise ValueError(
            f"no kernel runs this call of {call.operation} with {call.optional_features}: {reasons}. "
            "backend='reference' runs it slowly in PyTorch"
        )
    return chosen


def explain(call: CallSpec) -> list[Choice]:
    """Every backend, best first, with the reason why it does not accept the call."""
    return [Choice(name, refusal(call, name)) for name in _names(call.operation)]


def refusal(call: CallSpec, backend: str) -> str | None:
    """Why ``backend`` cannot run a call, in words that follow "it ", or None."""
    candidate = _REGISTRY[call.operation].get(backend)
    return f"has no {call.operation} in this version" if candidate is None else candidate.refuses(call)


def implementation(operation: str, backend: str) -> Function:
    """The function of an operation for a backend that ``select`` returned."""
    return _loaded(_REGISTRY[operation][backend])


@functools.cache
def _loaded(chosen: Implementation) -> Function:
    return chosen.load()


def _names(operation: str) -> tuple[str, ...]:
    """The operation's backends and the remaining ``BACKENDS``, best first."""
    own = tuple(name for name in _REGISTRY[operation] if name not in BACKENDS)
    return own + BACKENDS
