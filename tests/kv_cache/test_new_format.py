"""Adding a format: with a class and an entry in the registry, everything except kernels supports it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from flashlatte import kv_cache, sparse_decode
from flashlatte.kv_cache.formats import CacheFormat, Plane
from flashlatte.kv_cache.registry import FORMATS
from flashlatte.ops.cache_gather import cache_gather
from flashlatte.ops.cache_write import cache_write
from flashlatte.runtime import dispatch, machine


@dataclass(frozen=True)
class Int8Format(CacheFormat):
    """A page has the int8 elements of all tokens, then a float32 scale of each; no rope part."""

    name = "int8"
    record_dtype = torch.uint8
    accepted_dtypes = (torch.uint8,)

    head_dim: int = 32

    @property
    def rope_dim(self):
        return 0

    @property
    def planes(self):
        return Plane(self.head_dim, torch.uint8), Plane(4, torch.uint8)

    def encode(self, latent, rope, scale, scale_rounding):
        scales = latent.float().abs().amax(dim=-1, keepdim=True) / 127
        return (latent / scales).round().to(torch.int8).view(torch.uint8), scales.view(torch.uint8)

    def decode(self, planes, scale):
        numbers, scales = planes
        return numbers.contiguous().view(torch.int8).float() * scales.contiguous().view(torch.float32)


@pytest.fixture(autouse=True)
def triton_runs_there(monkeypatch):
    monkeypatch.setattr("flashlatte.runtime.refusals.triton", lambda call: None)


@pytest.fixture(autouse=True)
def known(monkeypatch):
    monkeypatch.setitem(FORMATS, "int8", Int8Format)


def test_write_gather_and_decode():
    cache = kv_cache.allocate("int8", 3, 5)
    assert cache.shape == (3, 5, 1, 36)
    rows = torch.randn(7, 32)
    slots = torch.tensor([14, 0, 3, 9, 5, 2, 11])
    backend = None if not machine.interpreting() else "reference"
    cache_write(cache, slots, rows, cache_format="int8", backend=backend)
    stored = kv_cache.read(cache, slots, cache_format="int8", dtype=torch.float32)
    torch.testing.assert_close(stored, rows, atol=0.02, rtol=0)
    gathered = cache_gather(
        cache, torch.tensor([[0]]), torch.tensor([0, 4]), cache_format="int8", dtype=torch.float32, backend=backend
    )
    torch.testing.assert_close(gathered[[0, 3, 2]], stored[[1, 2, 5]])

    q = torch.randn(1, 1, 2, 32)
    out, _ = sparse_decode(q, cache, slots[None, None], cache_format="int8", head_dim_v=16, backend="reference")
    weights = (q[0, 0].double() @ stored.double().T * 32**-0.5).softmax(dim=-1)
    torch.testing.assert_close(out[0, 0].double(), weights @ stored[:, :16].double(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("operation", ["sparse_decode", "cache_write", "cache_gather"])
def test_kernels_reject_unknown_formats(monkeypatch, operation):
    monkeypatch.setattr("flashlatte.runtime.machine.compute_capability", lambda _: (9, 0))
    call = dispatch.CallSpec(operation, torch.device("cuda", 0), torch.bfloat16, "int8", 64, 32, 32)
    refusals = {choice.backend: choice.refusal for choice in dispatch.explain(call)}
    assert refusals.pop("reference") is None
    assert all(refusals.values())
    assert "not int8" in (refusals["portable"] or "")


def test_index_keys_are_written_and_gathered_by_their_formats_name():
    rows = torch.randn(3, 128)
    for name in ("index_fp8", "index_mxfp4"):
        cache = kv_cache.allocate(name, 2, 4)
        cache_write(cache, torch.tensor([4, 5, 6]), rows, cache_format=name, backend="reference")
        table, ends = torch.tensor([[1]]), torch.tensor([0, 3])
        gathered = cache_gather(cache, table, ends, cache_format=name, dtype=torch.float32, backend="reference")
        torch.testing.assert_close(gathered, rows, atol=0.8, rtol=0.1)
        with pytest.raises(ValueError, match=f"takes caches in .*, not {name}$"):
            cache_write(cache, torch.tensor([4, 5, 6]), rows, cache_format=name, backend="portable")
