"""Multi-GPU capabilities of this machine, for ``flashlatte doctor``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def diagnose() -> dict[str, Any]:
    """Backends of torch.distributed, the number of GPUs, and whether NVLink connects all pairs (None: unknown)."""
    backends = {"nccl": "is_nccl_available", "gloo": "is_gloo_available"}
    available = [name for name, check in backends.items() if dist.is_available() and getattr(dist, check)()]
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {"backends": available, "gpus": gpus, "nvlink": _nvlink(gpus) if gpus > 1 else None}


def report(facts: dict[str, Any]) -> str:
    """The facts as one line of text."""
    gpus = {0: "no GPU", 1: "one GPU"}.get(facts["gpus"], f"{facts['gpus']} GPUs")
    nvlink = {True: ", all connected by NVLink", False: ", not all connected by NVLink", None: ""}[facts["nvlink"]]
    return f"multi-GPU: torch.distributed has {', '.join(facts['backends']) or 'no backend'}; {gpus}{nvlink}"


def _nvlink(gpus: int) -> bool | None:
    """Whether every two GPUs are connected by NVLink, directly or through switches."""
    try:
        # PyTorch's symmetric memory uses this detection, which is not a public API.
        from torch._C._autograd import DeviceType  # pyright: ignore[reportMissingImports]
        from torch._C._distributed_c10d import _detect_dma_connectivity  # pyright: ignore[reportAttributeAccessIssue]

        links = _detect_dma_connectivity(DeviceType.CUDA, "nvlink").matrix
        return all(links[one][other] > 0 for one in range(gpus) for other in range(gpus) if one != other)
    except (ImportError, AttributeError, RuntimeError, IndexError):
        return None
