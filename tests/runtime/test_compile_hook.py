"""Triton's hook after a compilation (``knobs.runtime.jit_post_compile_hook``), which vLLM always sets.

Triton writes all that a kernel was compiled for down as JSON for the hook, so every constant must be serialisable.
"""

from __future__ import annotations

import functools
import importlib
import json
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashlatte.runtime import dispatch, machine

pytest.importorskip("triton")

from support import no_gpu
from triton import knobs

import flashlatte
from flashlatte.ops.norm_rope import latent_rows, rotate_heads
from flashlatte.ops.norm_rope.rotary import Rotary
from flashlatte.runtime.triton_kernel import Kernel

pytestmark = pytest.mark.skipif(dispatch.interpreting(), reason="compiles, which the interpreter does not")

BF16 = torch.bfloat16


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the hook is told of kernels that calls on the CPU launch, of which nothing is compiled or run."""
    told: list[Any] = []

    no_gpu.use_without_compiling(monkeypatch)
    # The named backend, though the tensors are on the CPU.
    monkeypatch.setattr(dispatch, "select", lambda _, backend: backend)
    for module in (machine, dispatch):
        monkeypatch.setattr(module, "num_sms" if module is machine else "multiprocessors", lambda _: 132)
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **about: told.append(about))
    return told


def _rows(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def _ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def _dense_decode(backend: str, batch: int = 2, cache_dtype: torch.dtype = BF16) -> None:
    cache = _rows(4, 64, 1, 576, dtype=cache_dtype)
    flashlatte.dense_decode(_rows(batch, 1, 16, 576), cache, _ints(batch, 64), _ints(batch), backend=backend)


def _sparse_decode(backend: str, form: str, heads: int = 16, extra: bool = False) -> None:
    cache = flashlatte.kv_cache.allocate(form, 4, 64)
    flashlatte.sparse_decode(
        _rows(2, 1, heads, 512 if form == "model1" else 576),
        cache,
        _ints(2, 1, 512),
        topk_length=_ints(2) if extra else None,
        extra_k_cache=cache if extra else None,
        extra_indices=_ints(2, 1, 64) if extra else None,
        backend=backend,
    )


def _sparse_prefill(backend: str) -> None:
    flashlatte.sparse_prefill(_rows(3, 128, 576), _rows(200, 1, 576), _ints(3, 1, 128), backend=backend)


def _dense_prefill(backend: str) -> None:
    q, k, v = (_rows(70, 2, d).requires_grad_() for d in (192, 192, 128))
    for deterministic in (False, True):
        begins = torch.tensor([0, 70], dtype=torch.int32)
        out, _ = flashlatte.dense_prefill(q, k, v, begins, begins, 70, 70, deterministic=deterministic, backend=backend)
        out.sum().backward()


def _caches(form: str) -> None:
    cache = flashlatte.kv_cache.allocate(form, 4, 64)
    flashlatte.kv_cache.write(cache, _ints(3), _rows(3, 576 if form != "model1" else 512), backend="portable")
    flashlatte.kv_cache.gather(cache, _ints(1, 4), _ints(2), total_tokens=9, backend="portable")


def _norm_rope() -> None:
    rotary = Rotary(torch.zeros(8, 64), _ints(3), interleaved=True)
    latent_rows(_rows(3, 576), _rows(512), rotary, 1e-6, backend="portable")
    rotate_heads(_rows(3, 2, 64), rotary, _rows(3, 2, 64), backend="portable")


def _merge_states() -> None:
    flashlatte.merge_states([_rows(3, 4, 64)] * 2, [torch.zeros(3, 4)] * 2, backend="portable")


OPERATIONS = (
    "cache_gather",
    "cache_write",
    "dense_decode",
    "dense_prefill",
    "merge_states",
    "norm_rope",
    "sparse_decode",
    "sparse_prefill",
)
CALLS: list[Callable[[], None]] = [
    lambda: _dense_decode("portable"),
    lambda: _dense_decode("portable", cache_dtype=torch.float8_e4m3fn),
    lambda: _dense_decode("hopper"),
    lambda: _dense_decode("hopper", batch=200),
    *(functools.partial(_sparse_decode, "portable", form, extra=True) for form in ("v32", "model1", "bf16")),
    *(functools.partial(_sparse_decode, "hopper", form) for form in ("v32", "model1", "bf16")),
    lambda: _sparse_decode("hopper", "v32", heads=128, extra=True),
    *(functools.partial(_sparse_prefill, backend) for backend in ("portable", "hopper")),
    *(functools.partial(_dense_prefill, backend) for backend in ("portable", "hopper")),
    *(functools.partial(_caches, form) for form in ("v32", "model1", "bf16")),
    _norm_rope,
    _merge_states,
]


def test_every_kernel_can_be_written_down(compiled: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashlatte.ops.sparse_decode.hopper.launch.clusters_fill", lambda *_: True)
    for call in CALLS:
        call()
    for about in compiled:
        assert json.loads(about["compile"]["specialization_data"])["constant_vals"]
    assert {about["fn"].jit_function for about in compiled} == _kernels()


def _kernels() -> set[Any]:
    """All kernels of these operations."""
    found = set()
    for package in ("split_kv", *(f"ops.{name}" for name in OPERATIONS)):
        package = importlib.import_module(f"flashlatte.{package}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            values = vars(importlib.import_module(module.name)).values()
            found |= {value.jitted for value in values if isinstance(value, Kernel)}
    return found
