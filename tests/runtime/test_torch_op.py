"""Properties of every operation that ``torch_op`` registers."""

import shutil
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from flashlatte import dense_decode, dense_prefill, kv_cache, sparse_decode, sparse_prefill
from flashlatte.testing.cases import DenseDecodeCase, DensePrefillCase, SparseDecodeCase, SparsePrefillCase

F32 = torch.float32


@pytest.mark.parametrize(
    ("operation", "case"),
    [
        (dense_decode, DenseDecodeCase(2, 2, 70, 4, dtype=F32)),
        (sparse_decode, SparseDecodeCase(2, 2, 70, 4, 20, dtype=F32)),
        (sparse_prefill, SparsePrefillCase(5, 70, 4, 20, dtype=F32)),
        (dense_prefill, DensePrefillCase(2, 30, 40, 4, 2, dtype=F32)),
    ],
    ids=["dense_decode", "sparse_decode", "sparse_prefill", "dense_prefill"],
)
def test_autocast_takes_no_precision_from_an_operation(operation, case):
    inputs = case.inputs()
    expected = operation(**inputs)
    with torch.autocast("cpu", torch.bfloat16):
        results = operation(**inputs)
        assert torch.is_autocast_enabled("cpu")
    for result, wanted in zip(results, expected, strict=True):
        assert result.equal(wanted)


def test_autocast_takes_no_precision_from_a_gradient():
    inputs = DensePrefillCase(2, 30, 40, 4, 2, dtype=F32).inputs()

    def gradient() -> torch.Tensor:
        q = inputs["q"].clone().requires_grad_()
        out, _ = dense_prefill(**inputs | {"q": q})
        return torch.autograd.grad(out.sum(), q)[0]

    expected = gradient()
    with torch.autocast("cpu", torch.bfloat16):
        assert gradient().equal(expected)


def test_an_operation_writes_to_inference_tensors_outside_of_inference_mode():
    k_rope, rows = torch.ones(2, 64), torch.ones(2, 32)
    arguments: dict[str, Any] = {"slot_mapping": torch.arange(2), "positions": torch.arange(2)}
    arguments["cos_sin"] = torch.full((2, 64), 0.5)
    with torch.inference_mode():
        of_inference = kv_cache.allocate("fp32", 1, 2, head_dim=96), k_rope.clone()
    for cache, rope in ((kv_cache.allocate("fp32", 1, 2, head_dim=96), k_rope), of_inference):
        kv_cache.rope_write(cache, latent=rows, k_rope=rope, interleaved=True, **arguments)
        assert rope[0, :4].tolist() == [0.0, 1.0, 0.0, 1.0]
        assert torch.equal(cache[0, :, 0, 32:], rope)


def written_sums(compiled: object, layer: int) -> list[float]:
    """Sums of each layer's cache, after writing rows of ones to one of them."""
    caches = torch.zeros(3, 4, 16, 1, 576)
    compiled(caches, layer, torch.arange(5), torch.ones(5, 512), torch.ones(5, 64))  # type: ignore[operator]
    return caches.flatten(1).sum(1).tolist()


def write_layer(caches, layer, slots, latent, rope):
    kv_cache.write(caches[layer], slots, latent, rope=rope)
    return caches.sum()


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_program_for_any_sizes_writes_to_one_place(dynamic):
    """Inductor assumes offset 0 for a written tensor if the offset is symbolic."""
    torch._dynamo.reset()
    compiled = torch.compile(write_layer, backend=(counter := CompileCounter()), dynamic=dynamic)
    assert [written_sums(compiled, layer)[layer] for layer in (1, 2, 1)] == [2880.0] * 3
    assert counter.frame_count == 2


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor wants a C++ compiler")
@pytest.mark.parametrize("dynamic", [None, True])
def test_inductor_writes_to_the_given_tensor(dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(write_layer, dynamic=dynamic)
    assert [written_sums(compiled, layer) for layer in (1, 2)] == [[0.0, 2880.0, 0.0], [0.0, 0.0, 2880.0]]
