"""Launches that begin before the kernel ahead of them has ended (programmatic dependent launch; Hopper and later).

Such a kernel is launched with ``launch_options`` and calls ``gdc_wait()`` before it reads or writes anything that other
kernels write or read; what is ahead of it calls ``gdc_launch_dependents()`` early.
"""

from __future__ import annotations

from typing import Any

import torch

from flashlatte.runtime import machine

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # a Triton without NVIDIA's backend, for which launches do not overlap
    gdc_launch_dependents = gdc_wait = None

__all__ = ["gdc_launch_dependents", "gdc_wait", "launch_options", "launches_overlap"]


def launches_overlap(device: torch.device) -> bool:
    """Whether a kernel can be launched before the one that it depends on has ended."""
    if machine.interpreting():
        return False
    is_nvidia = machine.device_type(device) == "cuda" and torch.version.hip is None
    return is_nvidia and machine.compute_capability(device) >= (9, 0)


def launch_options(overlapped: bool) -> dict[str, Any]:
    return {"launch_pdl": True} if overlapped else {}
