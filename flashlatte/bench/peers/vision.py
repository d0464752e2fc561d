"""Bidirectional attention over packed images with the head dims of vision encoders, and PyTorch's kernels on it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashlatte.bench.alternate import TimedCall
from flashlatte.bench.workloads import draw
from flashlatte.bench.workloads.base import ROUNDED, Results, compare, nbytes
from flashlatte.ops.dense_prefill import dense_prefill

HEADS = 16
BF16 = torch.bfloat16


def images(head_dim: int, lengths: list[int], name: str, device: torch.device) -> list[TimedCall]:
    """The same images with both kernels; also with PyTorch's, which need a batch of equal lengths."""
    rng = draw.generator(device)
    q, k, v = (draw.normal((sum(lengths), HEADS, head_dim), BF16, rng) for _ in range(3))
    bounds = torch.tensor([0, *lengths], device=device).cumsum(0).int()

    def run(backend: str) -> Results:
        out, _ = dense_prefill(q, k, v, bounds, bounds, max(lengths), max(lengths), backend=backend)
        return {"out": out}

    batch = (
        [x.view(len(lengths), -1, HEADS, head_dim).transpose(1, 2) for x in (q, k, v)] if len(set(lengths)) == 1 else []
    )

    def run_pytorch(kernel: SDPBackend, _: str) -> Results:
        with sdpa_kernel(kernel):
            out = torch.nn.functional.scaled_dot_product_attention(batch[0], batch[1], batch[2])
        return {"out": out.transpose(1, 2).reshape(q.shape)}

    expected = functools.cache(functools.partial(run, "reference"))

    def check(results: Results) -> None:
        compare(results, expected(), {"out": ROUNDED})

    calls: dict[str, Callable[[str], Results]] = {"hopper": run, "portable": run}
    if batch and device.type == "cuda":
        calls["pytorch-flash"] = functools.partial(run_pytorch, SDPBackend.FLASH_ATTENTION)
        calls["pytorch-cudnn"] = functools.partial(run_pytorch, SDPBackend.CUDNN_ATTENTION)
    return [
        TimedCall(
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


def vision(device: torch.device) -> Iterator[list[TimedCall]]:
    is_gpu = device.type == "cuda"
    shapes = {
        "16x1024": [1024 if is_gpu else 9] * (16 if is_gpu else 2),
        "4x4096": [4096 if is_gpu else 17] * (4 if is_gpu else 1),
        "ragged": [1024, 4096, 2048, 3072, 1536, 2560, 1024, 3584, 1280, 2304] if is_gpu else [3, 0, 11],
    }
    for head_dim in (64, 72, 80, 96, 128):
        for name, lengths in shapes.items():
            yield images(head_dim, lengths, name, device)
