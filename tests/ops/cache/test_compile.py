"""The kernels of ``write`` and ``gather`` as machine code of GPUs that need not be there."""

import importlib
import re

import pytest
import torch
from support.compile import SHARED_BYTES, Recorder, compile_launch, variant_key

from flashlatte import kv_cache
from flashlatte.runtime import dispatch

WRITE = importlib.import_module("flashlatte.ops.cache_write.portable")
GATHER = importlib.import_module("flashlatte.ops.cache_gather.portable")
KERNELS = [
    (WRITE, "write_tiles_kernel"),
    (WRITE, "write_rows_kernel"),
    (GATHER, "gather_tiles_kernel"),
    (GATHER, "gather_rows_kernel"),
]
# Loads and stores of 16 bytes that a thread makes: the whole of latent and rope. (Triton 3.6 drops the store of
# model1's eighth tile, which is never made.)
WIDE_MOVES = {
    "write v32": (9, 5),
    "write model1": (9, 5),
    "write bf16": (2, 2),
    "write fp8": (2, 1),
    "gather v32": (5, 9),
    "gather model1": (5, 9),
    "gather bf16": (2, 2),
    "gather fp8": (1, 2),
}

pytestmark = pytest.mark.skipif(dispatch.interpreting(), reason="kernels are interpreted, not compiled")


@pytest.fixture
def recorders(monkeypatch):
    """Kernels that record their launches, by the function that launches them."""
    by_function = {"write": [], "gather": []}
    for module, name in KERNELS:
        recorder = Recorder(getattr(module, name))
        monkeypatch.setattr(module, name, recorder)
        by_function[name.partition("_")[0]].append(recorder)
    return by_function


def run_write(name, *, tokens=100, pages=8, page_size=64, gap=0, scale_rounding="power_of_two", split=False):
    layout = kv_cache.get_format(name)
    cache = kv_cache.allocate(name, pages, page_size)
    x = torch.zeros(tokens, layout.head_dim + gap, dtype=torch.bfloat16)[:, : layout.head_dim]
    rope = None
    if split:
        x, rope = x[:, : layout.latent_dim], x[:, layout.latent_dim :]
    slots = torch.zeros(tokens, dtype=torch.int64)
    WRITE.cache_write(cache, slots, x, rope, layout, None, 1.0, scale_rounding)


def run_gather(name, *, requests=4, columns=8, rows=100, pages=8, page_size=64, gap=0):
    layout = kv_cache.get_format(name)
    cache = kv_cache.allocate(name, pages, page_size)
    table = torch.zeros(requests, columns, dtype=torch.int32)
    cu_seqlens = torch.zeros(requests + 1, dtype=torch.int32)
    out = torch.zeros(rows, layout.head_dim + gap, dtype=torch.bfloat16)[:, : layout.head_dim]
    GATHER.cache_gather(cache, table, cu_seqlens, None, layout, None, 1.0, out)


RUN = {"write": run_write, "gather": run_gather}


def launches(recorders):
    return [(recorder.fn, launch) for recorder in recorders for launch in recorder.launches]


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("case", WIDE_MOVES)
def test_rows_move_in_16_byte_pieces_without_spills(case, arch, recorders, monkeypatch):
    for module in (WRITE, GATHER):
        monkeypatch.setattr(module, "converts_e4m3", lambda device: arch >= 89)
    function, name = case.split()
    RUN[function](name)
    ((fn, launch),) = launches(recorders[function])
    compiled = compile_launch(fn, launch, arch)
    loads = len(re.findall(r"\bLDG\.E\.128\b", compiled.sass))
    stores = len(re.findall(r"\bSTG\.E\.128\b", compiled.sass))
    expected_loads, expected_stores = WIDE_MOVES[case]
    assert loads == expected_loads
    assert stores in (expected_stores, expected_stores - (case == "gather model1"))
    assert compiled.spills == 0
    assert compiled.registers <= 96
    assert compiled.shared <= SHARED_BYTES[arch]


def test_exact_scales_compile_without_spills(recorders):
    run_write("v32", scale_rounding="exact")
    ((fn, launch),) = launches(recorders["write"])
    compiled = compile_launch(fn, launch, 90)
    assert compiled.spills == 0
    assert compiled.registers <= 128


@pytest.mark.parametrize("name", ["v32", "model1", "bf16", "fp8"])
def test_new_sizes_compile_nothing(name, recorders):
    for size in range(1, 21):
        # A row whose stride keeps to 16 bytes and one that does not are two variants; the numbers are no others.
        run_write(name, tokens=size, pages=size, page_size=16 * size, gap=8 * size)
        run_gather(name, requests=size, columns=size, rows=size, pages=size, page_size=16 * size, gap=8 * size)
    for function in recorders.values():
        keys = {variant_key(fn, launch) for fn, launch in launches(function)}
        assert len(keys) == 1


def test_strides_that_are_not_aligned_are_few_variants(recorders):
    for gap in range(40):
        run_write("v32", gap=gap, split=True)
    keys = {variant_key(fn, launch) for fn, launch in launches(recorders["write"])}
    assert len(keys) <= 4
