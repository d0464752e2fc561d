"""Triton kernels whose programs run in clusters: on neighbouring SMs, with access to each other's shared memory.

What Triton compiles for several CTAs a program has layouts that span them. Here each program of a cluster is compiled
by itself, as ever, and only the launch says that they belong together; what they exchange is inline PTX.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton

# What a program may have of an SM's shared memory.
_SHARED_BYTES = 232_448


def in_clusters(jitted: Any, size: int, tail_bytes: int) -> Any:
    """Let a ``LeanLaunch`` kernel run in clusters, which its grid then counts.

    Args:
        size: programs of a cluster, neighbours in the grid.
        tail_bytes: of shared memory behind what Triton allocates, which ends where ``%dynamic_smem_size`` says.
    """
    if isinstance(jitted, triton.JITFunction):
        jitted.cluster = size, tail_bytes  # type: ignore[attr-defined]
    return jitted


def join(compiled: Any, size: int, tail_bytes: int) -> None:
    """Change what the launcher is told of a compiled kernel, once."""
    warps, programs, shared = compiled.packed_metadata
    if programs == 1:
        compiled.packed_metadata = warps, size, shared + tail_bytes


def clusters_fill(device: torch.device, size: int) -> bool:
    """Whether clusters of programs that take an SM each fill all SMs of a GPU."""
    return device.type == "cuda" and _clusters_fill(device, size)


@functools.cache
def _clusters_fill(device: torch.device, size: int) -> bool:
    with torch.cuda.device(device):
        compiled = _nothing.warmup(grid=(1,))
        _ = compiled.run  # which loads it
        utils = triton.runtime.driver.active.utils  # type: ignore[attr-defined]
        clusters = utils.cuOccupancyMaxActiveClusters(compiled.function, _SHARED_BYTES, size)
    return clusters * size >= torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def _nothing():
    pass
