"""Programmatic dependent launch (Hopper and later): kernels that start before the preceding kernel in the stream has
finished.

A dependent kernel is launched with ``launch_options`` and calls ``gdc_wait()`` before it accesses memory that other
kernels write or read. The preceding kernel calls ``gdc_launch_dependents()`` early.
"""

from __future__ import annotations

from typing import Any

import torch

from flashlatte.runtime import machine

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # Triton without NVIDIA's backend, where launches do not overlap
    gdc_launch_dependents = gdc_wait = None

__all__ = ["gdc_launch_dependents", "gdc_wait", "launch_options", "launches_overlap"]


def launches_overlap(device: torch.device) -> bool:
    """Whether the device supports programmatic dependent launch."""
    if machine.interpreting():
        return False
    is_nvidia = machine.device_type(device) == "cuda" and torch.version.hip is None
    return is_nvidia and machine.compute_capability(device) >= (9, 0)


def launch_options(overlapped: bool) -> dict[str, Any]:
    return {"launch_pdl": True} if overlapped else {}
