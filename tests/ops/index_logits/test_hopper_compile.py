"""Compile tests of the Hopper kernels, without a GPU: recorded launches are compiled to cubins."""

from __future__ import annotations

import dataclasses
import random
import re
from typing import Any

import pytest
import torch
from support.compile import SHARED_BYTES, Launch, Recorder, variant_key
from support.later_spills import allowed
from support.marks import mostly_full

from flashlatte.runtime import machine

triton = pytest.importorskip("triton")

from support import compile as support  # noqa: E402

from flashlatte.ops.index_logits import api  # noqa: E402
from flashlatte.ops.index_logits.hopper import launch  # noqa: E402
from flashlatte.ops.index_logits.reference import IndexLogitsParams, PagedIndexLogitsParams  # noqa: E402

pytestmark = pytest.mark.skipif(machine.interpreting(), reason="compiles, which the interpreter does not")

PROGRAMS = 132
KERNELS = {
    "ragged": launch.index_logits_ragged_kernel,
    "paged": launch.index_logits_paged_kernel,
    "clean_ragged": launch.clean_ragged_kernel,
    "clean_paged": launch.clean_paged_kernel,
}
# Scores per thread of a consumer, of a tile of 64 keys and 256 columns.
SCORES = 64 * 256 // 128


@pytest.fixture
def record(monkeypatch):
    """Calls a launcher and returns its launches by kernel."""
    recorders = {name: Recorder(fn) for name, fn in KERNELS.items()}
    monkeypatch.setattr(machine, "num_sms", lambda device: PROGRAMS)
    for name, kernel in KERNELS.items():
        monkeypatch.setattr(launch, kernel.jitted.__name__, recorders[name])

    def call(function: Any, **arguments: Any) -> dict[str, Launch]:
        for recorder in recorders.values():
            recorder.launches.clear()
        function(**arguments)
        return {name: recorder.launches[0] for name, recorder in recorders.items() if recorder.launches}

    return call


def vectors(*shape: int, pad: int = 0) -> torch.Tensor:
    return torch.empty(*shape[:-1], shape[-1] + pad, dtype=torch.float8_e4m3fn)[..., : shape[-1]]


def ragged(
    queries: int = 100,
    keys: int = 1000,
    heads: int = 64,
    head_dim: int = 128,
    pad: int = 0,
    dtype: torch.dtype = torch.float32,
    index_dtype: torch.dtype = torch.int32,
    clean: bool = False,
    compressed: bool = False,
) -> None:
    """A call of the implementation with tensors of arbitrary contents."""
    params = IndexLogitsParams(
        vectors(queries, heads, head_dim),
        vectors(keys, head_dim, pad=pad),
        torch.empty(keys),
        torch.empty(queries, heads),
        torch.zeros(queries, 1 + pad, dtype=index_dtype)[:, 0],
        torch.zeros(queries, dtype=index_dtype),
        torch.empty(queries, keys + pad, dtype=dtype)[:, :keys],
        clean,
        compressed,
    )
    launch.ragged(params)


def paged(
    requests: int = 4,
    next_n: int = 1,
    heads: int = 64,
    page_size: int = 64,
    columns: int = 16,
    per_query: bool = False,
    pad: int = 0,
    dtype: torch.dtype = torch.float32,
    index_dtype: torch.dtype = torch.int32,
    clean: bool = False,
) -> None:
    params = PagedIndexLogitsParams(
        vectors(requests, next_n, heads, 128),
        torch.empty(10, page_size, 1, 132, dtype=torch.uint8),
        torch.empty(requests * next_n, heads),
        torch.zeros(*((requests, next_n) if per_query else (requests,)), dtype=index_dtype),
        torch.zeros(requests, columns + pad, dtype=index_dtype)[:, :columns],
        torch.empty(requests * next_n, columns * page_size + pad, dtype=dtype)[:, : columns * page_size],
        clean,
    )
    launch.paged(params)


RAGGED = {
    "64 heads": {},
    "32 heads": {"heads": 32},
    "128 heads": {"heads": 128},
    "8 heads of 64, bf16 logits": {"heads": 8, "head_dim": 64, "dtype": torch.bfloat16, "index_dtype": torch.int64},
}
PAGED = {
    "64 heads": {},
    "16 heads": {"heads": 16},
    "64 heads, 2 tokens": {"next_n": 2},
    "64 heads, 4 tokens, pages of 128": {"next_n": 4, "page_size": 128},
    "64 heads, 5 tokens, pages of 32": {"next_n": 5, "page_size": 32, "per_query": True},
    "8 heads, pages of 256, bf16 logits": {"heads": 8, "page_size": 256, "dtype": torch.bfloat16},
}


@pytest.mark.parametrize("name", mostly_full(RAGGED, next(iter(RAGGED))))
def test_machine_code_of_ragged(record, name):
    code = support.compile_gluon(KERNELS["ragged"], record(ragged, **RAGGED[name])["ragged"])
    head_dim = RAGGED[name].get("head_dim", 128)

    # With 16 queries at a time, not all row addresses fit in registers.
    in_loop = 2 if RAGGED[name].get("heads") == 8 else 0
    assert support.loop_spills(code.sass) <= allowed(f"index_logits loop, {name}", in_loop)
    assert code.spills <= allowed(f"index_logits, {name}", 8)
    assert code.registers <= 168
    assert code.shared <= SHARED_BYTES[90]
    multiplications = re.findall(r"\bQGMMA\.64x128x32\.F32\.E4M3\.E4M3\b", code.sass)
    assert 0 < len(multiplications) <= 2 * 2 * head_dim // 32
    # A compiler that serializes products waits after each of them.
    assert len(re.findall(r"\bWARPGROUP\.DEPBAR\b", code.sass)) <= 2 * 2
    # One maximum per score, and little more than one multiply-add.
    assert len(re.findall(r"\bFMNMX\b", code.sass)) <= 2 * SCORES
    assert len(re.findall(r"\b(?:FFMA|FMUL|FADD)\b", code.sass)) <= 2 * SCORES * 1.6


@pytest.mark.parametrize("name", mostly_full(PAGED, next(iter(PAGED))))
def test_machine_code_of_paged(record, name):
    code = support.compile_gluon(KERNELS["paged"], record(paged, **PAGED[name])["paged"])

    assert support.loop_spills(code.sass) == 0
    assert code.spills <= 8
    assert code.shared <= SHARED_BYTES[90]
    assert 0 < len(re.findall(r"\bQGMMA\.", code.sass)) <= 2 * 128 // 32
    assert len(re.findall(r"\bWARPGROUP\.DEPBAR\b", code.sass)) <= 2


def test_mbarriers_of_paged_are_initialized_without_barriers_between(record):
    """Each barrier of the CTA would delay the first keys."""
    launched = record(paged)["paged"]
    ptx = support.compile_gluon(KERNELS["paged"], launched).ptx
    instructions = [line.strip() for line in ptx.splitlines()]
    initializations = [i for i, line in enumerate(instructions) if "mbarrier.init" in line]
    # One for the descriptors, two of each slot of queries and of each pair of slots of keys.
    assert len(initializations) == 1 + 2 * 2 + 2 * 8
    between = instructions[initializations[0] : initializations[-1]]
    assert not [line for line in between if line.startswith(("bar.sync", "barrier.sync"))]
    # Each partition waits for the preceding kernel.
    assert launched.options["launch_pdl"] is True
    assert sum("griddepcontrol.wait" in line for line in instructions) == 3


def test_logits_are_reduced_without_shared_memory(record):
    code = support.compile_gluon(KERNELS["ragged"], record(ragged)["ragged"])
    assert len(re.findall(r"\bSHFL\b", code.sass)) > 0
    assert not re.search(r"\bLDSM\b|\bSTSM\b", code.sass)


@pytest.mark.parametrize("call", [ragged, paged])
def test_cleaning_compiles(record, call):
    launched = record(call, clean=True)
    name = f"clean_{call.__name__}"
    assert support.compile_launch(KERNELS[name], launched[name], 90).spills == 0
    assert f"clean_{call.__name__}" not in record(call)


def test_lengths_and_strides_compile_once(record):
    rng = random.Random(0)
    keys = set()
    for _ in range(20):
        pad = rng.choice([0, 16, 48])
        launched = record(ragged, queries=rng.choice([1, 7, 64]), keys=rng.choice([16, 100, 999]), pad=pad, clean=True)
        launched |= record(
            paged,
            requests=rng.choice([1, 3, 16]),
            page_size=rng.choice([128, 192, 320]),
            columns=rng.choice([1, 16]),
            next_n=rng.choice([3, 4]),
            pad=pad,
            clean=True,
        )
        keys.add(tuple(variant_key(KERNELS[name], launched[name]) for name in KERNELS))
    assert len(keys) == 1


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (4096, 32768), (64, 131072), (2048, 8192), (1, 1 << 20)])
@pytest.mark.parametrize("queries_of_item", [8, 16])
def test_items_cover_all_keys_of_all_queries(queries, keys, queries_of_item):
    item_keys = launch.keys_per_item(queries, keys, queries_of_item, PROGRAMS)
    assert item_keys % 64 == 0
    assert item_keys >= min(keys, 1024)
    blocks = -(-queries // queries_of_item)
    items = blocks * -(-keys // item_keys)
    # The target number, if there are enough keys.
    assert items >= min(PROGRAMS * 8, blocks * -(-keys // 1024))


def test_rows_that_tma_cannot_address_are_an_error(record):
    with pytest.raises(ValueError, match=r"^k must have rows that begin at multiples of 16 bytes for backend='hopper'"):
        record(ragged, pad=8)


@pytest.mark.parametrize("operation", ["index_logits", "paged_index_logits"])
def test_rows_that_tma_cannot_address_go_to_the_portable_kernel(monkeypatch, operation):
    """A view with row strides of 129 or 137 elements, and one that is not aligned to 16 bytes."""
    monkeypatch.setattr(api.dispatch, "select", lambda call, _: calls.append(call) or "reference")
    calls: list[api.dispatch.CallSpec] = []
    storage = torch.zeros(2 * 8 * 200, dtype=torch.float8_e4m3fn)
    for stride, offset in ((128, 0), (144, 0), (129, 0), (137, 0), (128, 8)):
        q = storage.as_strided((2, 8, 128), (8 * stride, stride, 1), offset)
        if operation == "index_logits":
            starts = torch.zeros(2, dtype=torch.int32)
            k, k_scale = torch.zeros(64, 128, dtype=torch.float8_e4m3fn), torch.ones(64)
            api.index_logits(q, k, torch.ones(2, 8), starts, starts, k_scale=k_scale)
        else:
            cache, table = torch.zeros(3, 64, 1, 132, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.int32)
            api.paged_index_logits(q.unsqueeze(1), cache, torch.ones(2, 8), table[:, 0], table)
    assert [call.rows_aligned for call in calls] == [True, True, False, False, False]
    monkeypatch.undo()
    monkeypatch.setattr("flashlatte.runtime.machine.compute_capability", lambda _: (9, 0))
    on_gpu = dataclasses.replace(calls[-1], device=torch.device("cuda", 0))
    assert api.dispatch.select(on_gpu) == "portable"
    with pytest.raises(ValueError, match=f"^backend='hopper' cannot serve this call of {operation}: it takes tensors "):
        api.dispatch.select(on_gpu, "hopper")
