"""Time attention over packed images, bidirectional, for the head dims that vision encoders have, beside PyTorch's.

PYTHONPATH=. python benchmarks/vision.py [--section NAME] [--json benchmarks/results/vision.jsonl]
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator

import checked
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashlatte.bench.workloads import draw
from flashlatte.bench.workloads.base import Results
from flashlatte.bench.workloads.tokens import ROUNDED, nbytes
from flashlatte.ops.dense_prefill import dense_prefill

HEADS = 16
BF16 = torch.bfloat16
CHECKS = {"out": ROUNDED}


def images(head_dim: int, lengths: list[int], name: str, device: torch.device) -> list[checked.Case]:
    """The same images by both kernels, and by PyTorch's where all have one length, which it wants as a batch."""
    rng = draw.generator(device)
    q, k, v = (draw.normal((sum(lengths), HEADS, head_dim), BF16, rng) for _ in range(3))
    bounds = torch.tensor([0, *lengths], device=device).cumsum(0).int()

    def run(backend: str) -> Results:
        out, _ = dense_prefill(q, k, v, bounds, bounds, max(lengths), max(lengths), backend=backend)
        return {"out": out}

    batch = (
        [x.view(len(lengths), -1, HEADS, head_dim).transpose(1, 2) for x in (q, k, v)] if len(set(lengths)) == 1 else []
    )

    def of_pytorch(kernel: SDPBackend, _: str) -> Results:
        with sdpa_kernel(kernel):
            out = torch.nn.functional.scaled_dot_product_attention(*batch)
        return {"out": out.transpose(1, 2).reshape(q.shape)}

    check = checked.against(functools.partial(run, "reference"), CHECKS)
    calls: dict[str, Callable[[str], Results]] = {"hopper": run, "portable": run}
    if batch and device.type == "cuda":
        calls["pytorch-flash"] = functools.partial(of_pytorch, SDPBackend.FLASH_ATTENTION)
        calls["pytorch-cudnn"] = functools.partial(of_pytorch, SDPBackend.CUDNN_ATTENTION)
    return [
        checked.Case(
            "dense_prefill",
            f"vision-d{head_dim}-{name}",
            call,
            check,
            4 * nbytes(q),
            flops=4 * HEADS * head_dim * sum(length * length for length in lengths),
            backend=backend,
        )
        for backend, call in calls.items()
    ]


def vision(device: torch.device) -> Iterator[list[checked.Case]]:
    is_gpu = device.type == "cuda"
    shapes = {
        "16x1024": [1024 if is_gpu else 9] * (16 if is_gpu else 2),
        "4x4096": [4096 if is_gpu else 17] * (4 if is_gpu else 1),
        "ragged": [1024, 4096, 2048, 3072, 1536, 2560, 1024, 3584, 1280, 2304] if is_gpu else [3, 0, 11],
    }
    for head_dim in (64, 72, 80, 96, 128):
        for name, lengths in shapes.items():
            yield images(head_dim, lengths, name, device)


SECTIONS: checked.Sections = {"vision": vision}

if __name__ == "__main__":
    sys.exit(checked.main(__doc__ or "", SECTIONS))
