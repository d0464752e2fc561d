"""Compile tests of the portable kernels of index logits, without a GPU."""

import importlib

import pytest
import torch
from support.compile import SHARED_BYTES, Recorder, compile_launch, loop_spills, variant_key

from flashlatte import kv_cache
from flashlatte.ops.index_logits.portable import score
from flashlatte.ops.index_logits.reference import IndexLogitsParams, PagedIndexLogitsParams, SparseIndexLogitsParams
from flashlatte.runtime import machine

pytestmark = pytest.mark.skipif(machine.interpreting(), reason="kernels are interpreted, not compiled")

RAGGED = importlib.import_module("flashlatte.ops.index_logits.portable.ragged")
PAGED = importlib.import_module("flashlatte.ops.index_logits.portable.paged")
SPARSE = importlib.import_module("flashlatte.ops.index_logits.portable.sparse")
GPUS = {80: "ampere", 90: "hopper"}
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16


@pytest.fixture
def recorders(monkeypatch):
    found = {}
    for module, name in ((RAGGED, "ragged_kernel"), (PAGED, "paged_kernel"), (SPARSE, "sparse_kernel")):
        found[name] = Recorder(getattr(module, name))
        monkeypatch.setattr(module, name, found[name])
    return found


@pytest.fixture
def on(monkeypatch):
    def choose(arch):
        for module in (RAGGED, PAGED, SPARSE):
            monkeypatch.setattr(module, "gpu_class", lambda device: GPUS[arch])
        monkeypatch.setattr(score, "converts_e4m3", lambda device: arch >= 89)
        monkeypatch.setattr(machine, "num_sms", lambda device: 132)

    return choose


def ragged(dtype=E4M3, rows=64, keys=1024, heads=64):
    k, k_scale = torch.zeros(keys, 128).to(dtype), torch.ones(keys) if dtype == E4M3 else None
    q, weights = torch.zeros(rows, heads, 128, dtype=BF16).to(dtype), torch.zeros(rows, heads)
    ends = torch.zeros(rows, dtype=torch.int32)
    RAGGED.ragged(IndexLogitsParams(q, k, k_scale, weights, ends, ends, torch.zeros(rows, keys), False, False))


def paged(name="index_fp8", requests=4, pages=8, page_size=64, heads=64, next_n=1):
    cache = kv_cache.allocate(name, pages, page_size)
    q = torch.zeros(requests, next_n, heads, 128, dtype=BF16).to(E4M3 if name == "index_fp8" else BF16)
    weights, lengths = torch.zeros(requests * next_n, heads), torch.zeros(requests, dtype=torch.int32)
    table = torch.zeros(requests, pages, dtype=torch.int32)
    logits = torch.zeros(requests * next_n, pages * page_size)
    PAGED.paged(PagedIndexLogitsParams(q, cache, weights, lengths, table, logits, False))


def sparse(rows=16, pages=8, page_size=64, blocks=32, name="index_fp8"):
    cache, q = kv_cache.allocate(name, pages, page_size), torch.zeros(rows, 64, 128, dtype=BF16)
    first = torch.zeros(rows, blocks, dtype=torch.int32)
    q = q.to(E4M3) if name == "index_fp8" else q
    weights, logits = torch.zeros(rows, 64), torch.zeros(rows, 8 * blocks)
    SPARSE.sparse(SparseIndexLogitsParams(q, cache, None, weights, first, first, 8, logits))


@pytest.mark.parametrize("arch", [pytest.param(80, marks=pytest.mark.full), 90])
@pytest.mark.parametrize("call", [ragged, paged, sparse], ids=["ragged", "paged", "sparse"])
def test_keys_come_in_16_byte_copies_and_the_loop_does_not_spill(call, arch, recorders, on):
    on(arch)
    call()
    ((recorder, launch),) = [(recorder, launch) for recorder in recorders.values() for launch in recorder.launches]
    compiled = compile_launch(recorder.fn, launch, arch)
    assert loop_spills(compiled.sass) == 0
    assert compiled.shared <= SHARED_BYTES[arch]
    assert "QGMMA" in compiled.sass if arch == 90 else compiled.hmma > 0
    assert compiled.async_copies > 0


def test_new_sizes_compile_nothing(recorders, on):
    on(90)
    for size in (1, 3, 16, 100):
        ragged(rows=size, keys=16 * size)
        paged(requests=size, pages=size, page_size=4 * size)
        sparse(rows=size, pages=size, page_size=4 * size, blocks=size)
    for recorder in recorders.values():
        keys = {variant_key(recorder.fn, launch) for launch in recorder.launches}
        assert len(keys) == 1


def test_programs_are_bounded_by_the_gpu_and_by_the_work(recorders, on):
    on(90)
    paged(requests=200, pages=64)
    paged(requests=1, pages=2)
    grids = [launch.grid for launch in recorders["paged_kernel"].launches]
    assert grids == [(264, 1), (2, 1)]
