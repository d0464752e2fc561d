"""Calls with repeated launches: the results of the first call, without Triton's launcher."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gpu.harness import DEVICE

import flashlatte
from flashlatte import flash_mla
from flashlatte.runtime import repeat
from flashlatte.testing.draws import Draw

pytestmark = pytest.mark.gpu

Call = Callable[[], tuple[torch.Tensor, ...]]


def rows(draw: Draw, *shape: int) -> torch.Tensor:
    return draw.normal(*shape, dtype=torch.bfloat16)


def dense_decode(draw: Draw) -> Call:
    q, k_cache = rows(draw, 2, 1, 128, 576), rows(draw, 32, 64, 1, 576)
    block_table = torch.arange(32, dtype=torch.int32, device=DEVICE).view(2, 16)
    lengths = torch.tensor([1000, 77], dtype=torch.int32, device=DEVICE)
    return lambda: flashlatte.dense_decode(q, k_cache, block_table, lengths)


def sparse_decode(draw: Draw) -> Call:
    cache = flashlatte.kv_cache.allocate("v32", 32, 64, device=DEVICE)
    slots = torch.arange(32 * 64, device=DEVICE)
    flashlatte.kv_cache.write(cache, slots, rows(draw, 32 * 64, 576))
    q, indices = rows(draw, 2, 1, 128, 576), slots.view(2, 1, 1024).int()
    return lambda: flashlatte.sparse_decode(q, cache, indices)


def flash_mla_with_kvcache(draw: Draw) -> Call:
    caches = [flashlatte.kv_cache.allocate("model1", 8, page_size, device=DEVICE) for page_size in (256, 64)]
    for cache in caches:
        slots = torch.arange(cache.shape[0] * cache.shape[1], device=DEVICE)
        flashlatte.kv_cache.write(cache, slots, rows(draw, len(slots), 512))
    indices = [torch.arange(topk, dtype=torch.int32, device=DEVICE).repeat(2, 2, 1) for topk in (128, 512)]
    q, schedule = rows(draw, 2, 2, 64, 512), flash_mla.get_mla_metadata()[0]
    return lambda: flash_mla.flash_mla_with_kvcache(
        q,
        caches[0],
        None,
        None,
        512,
        schedule,
        is_fp8_kvcache=True,
        indices=indices[0],
        extra_k_cache=caches[1],
        extra_indices_in_kvcache=indices[1],
    )


def sparse_prefill(draw: Draw) -> Call:
    q, kv = rows(draw, 5, 128, 576), rows(draw, 300, 1, 576)
    indices = torch.arange(5 * 128, device=DEVICE, dtype=torch.int32).view(5, 1, 128)
    return lambda: flashlatte.sparse_prefill(q, kv, indices)


def sparse_decode_of_two_parts(draw: Draw) -> Call:
    cache = rows(draw, 32, 64, 1, 576)
    indices = torch.arange(32 * 64, device=DEVICE).view(2, 1, 1024).int()
    q, q_rope = rows(draw, 128, 2, 1, 512).movedim(0, 2), rows(draw, 2, 1, 128, 192)[..., 128:]
    return lambda: flashlatte.sparse_decode(q, cache, indices, q_rope=q_rope)


def sparse_prefill_of_two_parts(draw: Draw) -> Call:
    q, q_rope = rows(draw, 128, 5, 512).transpose(0, 1), rows(draw, 5, 128, 192)[..., 128:]
    kv = rows(draw, 300, 1, 576)
    indices = torch.arange(5 * 128, device=DEVICE, dtype=torch.int32).view(5, 1, 128)
    return lambda: flashlatte.sparse_prefill(q, kv, indices, q_rope=q_rope)


def dense_prefill(draw: Draw) -> Call:
    q, k, v = rows(draw, 300, 4, 192), rows(draw, 300, 4, 192), rows(draw, 300, 4, 128)
    begins = torch.tensor([0, 100, 300], dtype=torch.int32, device=DEVICE)
    return lambda: flashlatte.dense_prefill(q, k, v, begins, begins, 200, 200, causal=True)


def merge_states(draw: Draw) -> Call:
    outs = [rows(draw, 7, 16, 512) for _ in range(3)]
    lses = [torch.randn(7, 16, device=DEVICE) for _ in range(3)]
    return lambda: flashlatte.merge_states(outs, lses)


def cache_write_and_gather(draw: Draw) -> Call:
    cache = flashlatte.kv_cache.allocate("v32", 4, 64, device=DEVICE)
    cache.zero_()
    slots, latents = torch.arange(256, device=DEVICE), rows(draw, 256, 576)
    pages = torch.arange(4, dtype=torch.int32, device=DEVICE).view(1, 4)
    begins = torch.tensor([0, 256], dtype=torch.int32, device=DEVICE)

    def call() -> tuple[torch.Tensor, ...]:
        flashlatte.kv_cache.write(cache, slots, latents)
        return cache, flashlatte.kv_cache.gather(cache, pages, begins, total_tokens=256)

    return call


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)


OPERATIONS = [
    dense_decode,
    sparse_decode,
    flash_mla_with_kvcache,
    sparse_prefill,
    sparse_decode_of_two_parts,
    sparse_prefill_of_two_parts,
    dense_prefill,
    merge_states,
    cache_write_and_gather,
]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """A list that grows with every launch through Triton's Python code."""
    from flashlatte.runtime.triton_kernel import Kernel

    launches: list[Any] = []
    launch = Kernel._launch

    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        launches.append(self)
        launch(self, *args, **kwargs)

    monkeypatch.setattr(Kernel, "_launch", counted)
    repeat.forget()
    yield launches
    repeat.forget()


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("default_device", [None, "cuda"])
def test_a_repeat_gives_the_call_s_results(
    launched: list[Any], operation: Callable[[Draw], Call], default_device: str | None
) -> None:
    calls = [operation(Draw(seed, DEVICE)) for seed in range(3)]
    expected = []
    for call in calls:
        repeat.forget()
        expected.append([result.clone() for result in call()])
    repeat.forget()
    calls[0]()
    launched.clear()
    torch.set_default_device(default_device)
    try:
        results = [call() for call in (*calls, *calls)]
    finally:
        torch.set_default_device(None)
    assert not launched
    for found, wanted in zip(results, expected * 2, strict=True):
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(*(bytes_of(tensor) for tensor in (one, other)))


def test_a_compiled_program_repeats_launches(launched: list[Any]) -> None:
    draw = Draw(0, DEVICE)
    q, k_cache = rows(draw, 2, 1, 128, 576), rows(draw, 32, 64, 1, 576)
    block_table = torch.arange(32, dtype=torch.int32, device=DEVICE).view(2, 16)
    lengths = torch.tensor([1000, 77], dtype=torch.int32, device=DEVICE)
    compiled = torch.compile(lambda x: flashlatte.dense_decode(x, k_cache, block_table, lengths)[0] + 1)
    first = compiled(q)
    # While it compiles, inductor runs the program with other dispatch keys, which a repeat distinguishes.
    compiled(q)
    launched.clear()
    assert torch.equal(compiled(q), first)
    assert not launched


def test_every_write_is_a_new_version(launched: list[Any]) -> None:
    cache, kept = torch.zeros(4, 64, 1, 576, device=DEVICE), torch.ones(1, device=DEVICE, requires_grad=True)
    slots, latents = torch.arange(256, device=DEVICE), Draw(0, DEVICE).normal(256, 576, dtype=torch.bfloat16)
    for _ in range(3):
        product = (kept * cache).sum()
        flashlatte.kv_cache.write(cache, slots, latents)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()
    assert len(launched) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torch_jit_trace_of_a_warm_call_computes(launched: list[Any]) -> None:
    logits = torch.randn(3, 7, 100, device=DEVICE)
    expected = [flashlatte.topk(rows, 8) for rows in logits]
    traced: Any = torch.jit.trace(lambda rows: flashlatte.topk(rows, 8), (logits[0],), check_trace=False)
    assert all(torch.equal(traced(rows), wanted) for rows, wanted in zip(logits, expected, strict=True))
    assert launched
