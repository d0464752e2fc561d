"""What this machine has for several ranks, for ``flashlatte doctor``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def examine() -> dict[str, Any]:
    """Backends of torch.distributed, how many GPUs there are, and whether NVLink joins them all (None: unknown)."""
    backends = {"nccl": "is_nccl_available", "gloo": "is_gloo_available"}
    there = [name for name, asks in backends.items() if dist.is_available() and getattr(dist, asks)()]
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {"backends": there, "gpus": gpus, "nvlink": _nvlink(gpus) if gpus > 1 else None}


def report(facts: dict[str, Any]) -> str:
    """The facts in a line."""
    gpus = {0: "no GPU here", 1: "one GPU here"}.get(facts["gpus"], f"{facts['gpus']} GPUs here")
    joined = {True: ", all joined by NVLink", False: ", not all joined by NVLink", None: ""}[facts["nvlink"]]
    return f"several GPUs: torch.distributed has {', '.join(facts['backends']) or 'nothing'}; {gpus}{joined}"


def _nvlink(gpus: int) -> bool | None:
    """Whether every two GPUs have links of NVLink, directly or by switches."""
    try:
        # By this PyTorch's own symmetric memory looks for them; it is not public.
        from torch._C._autograd import DeviceType  # pyright: ignore[reportMissingImports]
        from torch._C._distributed_c10d import _detect_dma_connectivity  # pyright: ignore[reportAttributeAccessIssue]

        links = _detect_dma_connectivity(DeviceType.CUDA, "nvlink").matrix
        return all(links[one][other] > 0 for one in range(gpus) for other in range(gpus) if one != other)
    except (ImportError, AttributeError, RuntimeError, IndexError):
        return None
