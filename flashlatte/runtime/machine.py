"""What kernels run on: a GPU's compute capability and size, or Triton's interpreter."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import NamedTuple

import torch

_INTERPRETING = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


def interpreting() -> bool:
    """Whether Triton kernels run in Triton's interpreter: settled by TRITON_INTERPRET when the kernels are imported."""
    return _INTERPRETING


class GPU(NamedTuple):
    """What calls are settled by: compute capability, (9, 0) for 9.0, and number of SMs."""

    capability: tuple[int, int]
    num_sms: int


_assumed: GPU | None = None


def assume(gpu: GPU) -> None:
    """From now on, calls with tensors on the CPU are settled in this process as if these were on ``gpu``.

    For a process that looks at what would be launched (``runtime.ahead``), before its first call.
    """
    global _assumed
    _assumed = gpu


@contextlib.contextmanager
def supposing(gpu: GPU) -> Iterator[None]:
    """``assume``, within: for who asks which implementations would serve there, and launches nothing."""
    global _assumed
    before, _assumed = _assumed, gpu
    _forget()
    try:
        yield
    finally:
        _assumed = before
        _forget()


def _forget() -> None:
    _compute_capability.cache_clear()
    num_sms.cache_clear()


def device_type(device: torch.device) -> str:
    """Of the device that kernels for tensors on ``device`` are for."""
    return device.type if _assumed is None else "cuda"


def compute_capability(device: torch.device) -> tuple[int, int]:
    """(0, 0) where there is no GPU, as with fake tensors of one."""
    return _compute_capability(device)


# What torch.compiler.assume_constant_result sets; calling it imports torch._dynamo, which takes as long as torch.
compute_capability._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


@functools.cache
def _compute_capability(device: torch.device) -> tuple[int, int]:
    if _assumed is not None:
        return _assumed.capability
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (0, 0)


@functools.cache
def num_sms(device: torch.device) -> int:
    """SMs of a GPU; on the CPU, where Triton's interpreter runs one program after the other, a few."""
    if _assumed is not None:
        return _assumed.num_sms
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
