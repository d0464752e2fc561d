"""FLASHLATTE_CHECK=1: invalid pages, slots, indices and lengths are errors, in every operation."""

import contextlib
import runpy

import pytest
import torch

import flashlatte
from flashlatte import kv_cache
from flashlatte.kv_cache import turboquant
from flashlatte.ops.cache_gather import gather_last
from flashlatte.ops.compress import compress
from flashlatte.ops.index_convert import index_convert, to_cache_indices
from flashlatte.ops.index_logits import paged_index_logits, sparse_index_logits
from flashlatte.ops.index_quantize import index_gather, index_quantize
from flashlatte.ops.norm_rope import Rotary, latent_rows
from flashlatte.ops.paged_attention import paged_attention
from flashlatte.runtime import value_checks

BF16 = torch.bfloat16
PAGES, PAGE_SIZE = 3, 4
SLOTS = PAGES * PAGE_SIZE


@pytest.fixture(params=[False, True], ids=["off", "on"])
def enabled(monkeypatch, request):
    monkeypatch.setattr(value_checks, "ENABLED", request.param)
    return request.param


def ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def cache(name="bf16"):
    return kv_cache.allocate(name, PAGES, PAGE_SIZE)


def keys(*shape):
    return torch.zeros(*shape, dtype=BF16)


def index_cache():
    return torch.zeros(PAGES, PAGE_SIZE, 1, 132, dtype=torch.uint8)


def turboquant_cache():
    return turboquant.allocate("turboquant_4bit_nc", PAGES, PAGE_SIZE, 1, 64)


# Operations by what they take: a block table and a length of one request of two pages; slots; indices.
WITH_TABLE = {
    "dense_decode cache_seqlens": lambda table, n: flashlatte.dense_decode(keys(1, 1, 2, 576), cache(), table, n),
    "turboquant_decode cache_seqlens": lambda table, n: flashlatte.turboquant_decode(
        keys(1, 1, 2, 64), turboquant_cache(), table, n
    ),
    "paged_attention seqused_k": lambda table, n: paged_attention(
        keys(1, 2, 64), keys(PAGES, PAGE_SIZE, 1, 64), keys(PAGES, PAGE_SIZE, 1, 64), table, n, ints(0, 1)
    ),
    "paged_index_logits cache_seqlens": lambda table, n: paged_index_logits(
        keys(1, 1, 8, 128), index_cache(), torch.ones(1, 8), n, table
    ),
    "gather cu_seqlens": lambda table, n: kv_cache.gather(cache(), table, ints(0, int(n)), total_tokens=99),
    "gather_records cu_seqlens": lambda table, n: kv_cache.gather_records(cache(), table, ints(0, int(n)), 99),
    "gather_last seq_lens": lambda table, n: gather_last(cache(), table, n, keys(1, 9, 576)),
    "index_gather cu_seqlens": lambda table, n: index_gather(index_cache(), table, ints(0, int(n)), 99),
    "turboquant_gather cu_seqlens": lambda table, n: flashlatte.turboquant_gather(
        turboquant_cache(), table, ints(0, int(n)), 99, 64
    ),
}


@pytest.mark.parametrize("operation", WITH_TABLE)
def test_pages_and_lengths(enabled, operation):
    call, name = WITH_TABLE[operation], operation.split()[1]
    call(ints([0, 2]), ints(8))
    call(ints([-1, 2]), ints(8))
    call(ints([1, 99]), ints(4))  # beyond the length
    call(ints([1, 2]), ints(0))
    for table, length, message in (
        (ints([0, 3]), 8, r"^block_table must hold values from 0 to 2, or -1 for none, got 3 at \[0, 1\]$"),
        (ints([-7, 1], dtype=torch.int64), 5, r"^block_table must hold .* got -7 at \[0, 0\]$"),
        (ints([0, 1]), 9, rf"^{name} must hold values from 0 to 8, got 9 at \[0\]$"),
    ):
        if enabled:
            with pytest.raises(ValueError, match=message):
                call(table, ints(length))
        else:
            call(table, ints(length))


def _rotate_and_cache(slots):
    table = torch.zeros(8, 64)
    flashlatte.rotate_and_cache(keys(1, 2, 512), keys(1, 512), table, ints(0), cache("model1"), slots)


def _latent_rows(slots):
    rotary = Rotary(torch.zeros(8, 64), ints(0), True)
    latent_rows(keys(1, 576), keys(512), rotary, 1e-6, cache=cache(), slot_mapping=slots)


WITH_SLOTS = {
    "write slot_mapping": lambda slots: kv_cache.write(cache(), slots, keys(1, 576)),
    "rope_write slot_mapping": lambda slots: kv_cache.rope_write(
        cache(), slots, keys(1, 512), keys(1, 64), ints(0), torch.zeros(9, 64), interleaved=True
    ),
    "sparse_index_logits first_key": lambda slots: sparse_index_logits(
        keys(1, 2, 128), index_cache(), torch.zeros(1, 2), slots.view(1, 1), ints([4]), block_size=4
    ),
    "index_quantize slot_mapping": lambda slots: index_quantize(index_cache(), slots, keys(1, 128)),
    "reshape_and_cache slot_mapping": lambda slots: flashlatte.reshape_and_cache(
        keys(1, 1, 64), keys(1, 1, 64), keys(PAGES, PAGE_SIZE, 1, 64), keys(PAGES, PAGE_SIZE, 1, 64), slots
    ),
    "turboquant_store slot_mapping": lambda slots: flashlatte.turboquant_store(
        keys(1, 1, 64), keys(1, 1, 64), turboquant_cache(), slots
    ),
    "rotate_and_cache slot_mapping": _rotate_and_cache,
    "latent_rows slot_mapping": _latent_rows,
    "sparse_decode indices": lambda slots: flashlatte.sparse_decode(keys(1, 1, 2, 576), cache(), slots.view(1, 1, 1)),
    "sparse_decode extra_indices": lambda slots: flashlatte.sparse_decode(
        keys(1, 1, 2, 576), cache(), ints([[0]]), extra_k_cache=cache(), extra_indices=slots.view(1, 1, 1)
    ),
    "sparse_prefill indices": lambda slots: flashlatte.sparse_prefill(
        keys(1, 2, 576), keys(SLOTS, 1, 576), slots.view(1, 1, 1)
    ),
    "to_cache_indices positions": lambda slots: to_cache_indices(slots, ints([0, 1, 2]), PAGE_SIZE),
    "index_convert indices": lambda slots: index_convert(slots.view(1, 1), ints([0, 1, 2]), PAGE_SIZE),
}


@pytest.mark.parametrize("operation", WITH_SLOTS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_and_indices(enabled, operation, dtype):
    call, name = WITH_SLOTS[operation], operation.split()[1]
    for slot in (0, SLOTS - 1, -1):
        call(ints(slot, dtype=dtype))
    for slot in (SLOTS, -2):
        if enabled:
            with pytest.raises(
                ValueError, match=rf"^{name} must hold values from 0 to 11, or -1 for none, got {slot} "
            ):
                call(ints(slot, dtype=dtype))
        else:
            call(ints(slot, dtype=dtype))


def test_indices_beyond_topk_length_may_be_anything(monkeypatch):
    monkeypatch.setattr(value_checks, "ENABLED", True)
    q, indices = keys(1, 2, 2, 576), torch.tensor([[[0, 99], [0, 1]]])
    for length in (ints(1), ints([1, 2])):
        flashlatte.sparse_decode(q, cache(), indices, topk_length=length)
    flashlatte.sparse_prefill(q[0], keys(SLOTS, 1, 576), indices.view(2, 1, 2), topk_length=ints(1, 2))
    with pytest.raises(ValueError, match=r"^indices must .* got 99 at \[0, 0, 1\]$"):
        flashlatte.sparse_decode(q, cache(), indices, topk_length=ints([2, 2]))
    with pytest.raises(ValueError, match=r"^topk_length must hold values from 0 to 2, got 3 at \[0\]$"):
        flashlatte.sparse_decode(q, cache(), indices, topk_length=ints(3))


@pytest.mark.parametrize(
    ("slots", "request_ids", "table", "message"),
    [
        ((99, 0), (0, 0), ([[0, 1]]), None),  # the first token finishes no group
        ((0, SLOTS), (0, 0), ([[0, 1]]), r"^slot_mapping must .* got 12 at \[1\]$"),
        ((0, 0), (0, 1), ([[0, 1]]), r"^request_ids must hold values from 0 to 0, or -1 for none, got 1 at \[1\]$"),
        ((0, 0), (0, 0), ([[3, 1]]), r"^state_table must hold values from 0 to 2, or -1 for none, got 3 at \[0\]$"),
        ((0, SLOTS), (0, -1), ([[0, 1]]), None),  # padding
    ],
)
def test_compressed_rows_and_states(monkeypatch, slots, request_ids, table, message):
    monkeypatch.setattr(value_checks, "ENABLED", True)
    rows, ape, weight = keys(2, 512), torch.zeros(2, 512), torch.ones(512)
    state = torch.zeros(PAGES, PAGE_SIZE, 1024)
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        compress(
            *(rows, rows, ape, weight, torch.zeros(8, 64), ints(*request_ids), ints(0, 1), cache("model1")),
            ints(*slots),
            state_cache=state,
            state_table=torch.tensor(table),
        )


def test_pages_before_a_window_may_be_anything(monkeypatch):
    monkeypatch.setattr(value_checks, "ENABLED", True)
    kv = keys(PAGES, PAGE_SIZE, 1, 64)
    paged_attention(keys(1, 2, 64), kv, kv, ints([99, 1]), ints(8), ints(0, 1), window=4, causal=True)
    with pytest.raises(ValueError, match=r"^block_table must .* got 99 at \[0, 0\]$"):
        paged_attention(keys(1, 2, 64), kv, kv, ints([99, 1]), ints(8), ints(0, 1), window=5, causal=True)


def test_fake_tensors_are_not_read(monkeypatch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr(value_checks, "ENABLED", True)
    with FakeTensorMode():
        slots = torch.zeros(3, dtype=torch.int32)
        value_checks.entries("slots", slots, 1)
        value_checks.pages(torch.zeros(3, 2, dtype=torch.int32), slots, 1, 1)


@pytest.mark.parametrize(("value", "expected"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_the_environment_turns_checks_on(monkeypatch, value, expected):
    monkeypatch.delenv("FLASHLATTE_CHECK", raising=False)
    if value is not None:
        monkeypatch.setenv("FLASHLATTE_CHECK", value)
    assert runpy.run_path(value_checks.__file__)["ENABLED"] is expected
