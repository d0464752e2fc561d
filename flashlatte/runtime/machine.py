"""The machine that kernels run on: a GPU's compute capability and SM count, or Triton's interpreter."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch

_INTERPRETING = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


def interpreting() -> bool:
    """Whether Triton kernels run in Triton's interpreter: TRITON_INTERPRET at the time of import decides."""
    return _INTERPRETING


class GPU(NamedTuple):
    """The properties of a GPU that launches depend on: compute capability, (9, 0) for 9.0, and number of SMs."""

    capability: tuple[int, int]
    num_sms: int


Function = TypeVar("Function", bound=Callable[..., Any])

_assumed: GPU | None = None
_caches: list[Any] = []


def cached(function: Function) -> Function:
    """``functools.cache`` for a property of the machine's GPU: ``assuming`` clears it."""
    cache: Any = functools.cache(function)
    _caches.append(cache)
    return cache


@contextlib.contextmanager
def assuming(gpu: GPU) -> Iterator[None]:
    """Inside, treat CPU tensors in this process as tensors on ``gpu``, for calls that launch nothing.

    This holds for all threads, so that no other thread may call operations meanwhile.
    """
    global _assumed
    before, _assumed = _assumed, gpu
    _clear_caches()
    try:
        yield
    finally:
        _assumed = before
        _clear_caches()


def _clear_caches() -> None:
    for cache in _caches:
        cache.cache_clear()


def device_type(device: torch.device) -> str:
    """The type of the device that kernels for tensors on ``device`` run on."""
    return device.type if _assumed is None else "cuda"


def compute_capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU; (0, 0) without a GPU, as for fake tensors."""
    return _compute_capability(device)


# Set as torch.compiler.assume_constant_result does; that imports torch._dynamo, which takes as long as importing torch.
compute_capability._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


@cached
def _compute_capability(device: torch.device) -> tuple[int, int]:
    if _assumed is not None:
        return _assumed.capability
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (0, 0)


@cached
def num_sms(device: torch.device) -> int:
    """SMs of a GPU; 4 on the CPU, where Triton's interpreter runs programs one after another."""
    if _assumed is not None:
        return _assumed.num_sms
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
