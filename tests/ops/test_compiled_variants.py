"""Number of compiled variants of a kernel: values that change between calls must not compile new ones."""

from __future__ import annotations

import random
from typing import Any

import pytest
from support.attention_calls import UNLIMITED
from support.calls import BF16, FP8
from support.launches import launches, main_kernels
from support.marks import mostly_full
from support.recording import Recording

from flashlatte.runtime import machine

pytestmark = pytest.mark.skipif(machine.interpreting(), reason="compiles, which the interpreter does not")


@pytest.fixture
def record(monkeypatch):
    return Recording(monkeypatch)


def some(rng: random.Random, **choices: list[Any]) -> dict[str, Any]:
    return {name: rng.choice(values) for name, values in choices.items()}


BATCHES = {"batch": [1, 4, 5, 16, 33, 200], "s_q": [1, 2, 5]}
STRIDES = {"q_pad": [0, 8, 24], "out_pad": [0, 8, 16]}
TOKENS = {"tokens": [1, 16, 100, 257], "requests": [1, 2, 16, 33], "heads": [8, 16, 32], "kv_heads": [1, 2, 8]}
WINDOWS = {"window": [(UNLIMITED, 0), (UNLIMITED, UNLIMITED), (15, 0), (16, 1)]}
PAGES = {"pages": [1, 7, 16], "page_size": [16, 64, 80], "tokens": [1, 3, 16, 100], "gap": [0, 8, 64]}
STEPS = {"tokens": [1, 2, 16, 600, 9000], "pages": [1, 3, 16]}
# Calls that differ in numbers only, and how many variants their kernels may have: most together, of the main kernel.
SAME_CODE = [
    ("dense_decode", "hopper", {**BATCHES, **STRIDES, "pages": [1, 7], "columns": [33, 64, 3000]}, 2),
    ("sparse_decode", "hopper", {**BATCHES, **STRIDES, "topk": [64, 100, 2048], "page_size": [2, 64, 576]}, 5),
    (
        "sparse_prefill",
        "hopper",
        {"s_q": [1, 3, 33], "heads": [1, 48, 128], "s_kv": [1, 100], "topk": [1, 17, 300], "kv_pad": [0, 8, 24]},
        1,
    ),
    (
        "sparse_decode",
        "hopper",
        {**BATCHES, **STRIDES, "topk": [64, 100, 2048], "page_size": [2, 64, 576], "split_q": [True]},
        5,
    ),
    (
        "sparse_prefill",
        "hopper",
        {"s_q": [1, 3, 33], "heads": [1, 48, 128], "s_kv": [1, 100], "q_pad": [0, 8, 24], "split_q": [True]},
        1,
    ),
    ("dense_prefill", "hopper", {**TOKENS, **WINDOWS, **STRIDES}, 1),
    ("dense_prefill_backward", "hopper", {**TOKENS, "pad": [0, 8, 24]}, 1),
    (
        "sparse_attention_backward",
        "hopper",
        {"s_q": [1, 64, 200], "heads": [65, 128], "topk": [1, 300], "s_kv": [1, 100, 9000], "kv_pad": [0, 8, 24]},
        1,
    ),
    (
        "indexer_loss",
        "hopper",
        {"s_q": [1, 64, 200], "heads": [65, 128], "topk": [1, 300], "s_kv": [1, 100, 9000], "kv_pad": [0, 8, 24]},
        1,
    ),
    ("indexer_loss", "hopper", {"s_q": [1, 64, 200], "topk": [None], "s_kv": [1, 100, 9000]}, 1),
    # One for each number of CTAs and of warps.
    ("topk", "hopper", {"rows": [1, 16, 60, 100, 300], "width": [9, 4097, 2**18], "k": [1100, 2048]}, 4),
    ("topk", "hopper", {"rows": [1, 16, 60, 100, 300], "width": [9, 4097], "page_size": [1, 64]}, 4),
    ("dense_decode", "portable", {**BATCHES, "columns": [1, 64, 3000]}, 2),
    ("sparse_decode", "portable", {**BATCHES, "topk": [200, 2048, 4000], "pages": [2, 9]}, 2),
    ("sparse_prefill", "portable", {"s_q": [1, 64, 200], "topk": [1, 300, 4000], "s_kv": [1, 100, 9000]}, 1),
    ("sparse_prefill", "portable", {"s_q": [1, 64, 200], "q_pad": [0, 8, 24], "split_q": [True]}, 1),
    ("sparse_decode", "portable", {**BATCHES, "q_pad": [0, 8, 24], "split_q": [True]}, 2),
    ("sparse_attention_backward", "portable", {"s_q": [1, 64, 200], "topk": [1, 300], "s_kv": [1, 100, 9000]}, 1),
    ("indexer_loss", "portable", {"s_q": [1, 64, 200], "topk": [1, 300], "s_kv": [1, 100, 9000]}, 1),
    ("indexer_loss", "portable", {"s_q": [1, 64, 200], "topk": [None], "s_kv": [1, 100, 9000]}, 1),
    ("dense_prefill", "portable", {**TOKENS, **WINDOWS}, 1),
    ("dense_prefill_backward", "portable", {**TOKENS, **WINDOWS}, 1),
    (
        "paged_attention",
        "portable",
        {"tokens": [2, 3, 17, 200], "requests": [1, 2, 40], "columns": [1, 7, 900], **STRIDES, **WINDOWS},
        3,
    ),
    ("merge_states", "portable", {"tokens": [3, 6, 60], "heads": [2, 4, 40], "gap": [1, 2, 21]}, 1),
    ("merge_states", "portable", {"tokens": [3, 60], "to_e4m3": [True], "context_tokens": [0, 1, 5, 16, 1000]}, 1),
    *(("cache_write", "portable", {"form": [form], **PAGES}, 1) for form in ("v32", "model1", "bf16", "fp8")),
    ("cache_write", "portable", {"form": ["bf16"], "of_requests": [True], "requests": [1, 3, 16], **PAGES}, 1),
    *(
        ("cache_gather", "portable", {"form": [form], "requests": [1, 4, 20], **PAGES}, 1)
        for form in ("v32", "model1", "bf16", "fp8")
    ),
    ("cache_copy", "portable", {"pairs": [1, 2, 16], "pages": [1, 7, 16], "page_size": [1, 2, 64]}, 1),
    (
        "reshape_and_cache",
        "portable",
        {**PAGES, "heads": [1, 2, 8], "cache_dtype": [FP8], "per_token": [True]},
        1,
    ),
    ("gather_records", "portable", {"requests": [1, 4], "tokens": [1, 16], "pages": [1, 16], "page_size": [1, 64]}, 1),
    ("compress", "portable", {**STEPS, "columns": [1, 2, 16], "requests": [1, 2, 16], "page_size": [1, 64]}, 1),
    ("concat_mla_q", "portable", {"tokens": [1, 2, 16, 77], "heads": [1, 16, 128]}, 1),
    # One for each size of block.
    ("index_weights", "portable", {"tokens": [1, 4, 5, 16, 17, 128], "heads": [1, 32, 64], "gap": [0, 8, 64]}, 3),
    ("mhc_post", "portable", {"tokens": [1, 2, 16, 77], "width": [1024, 4096, 7168]}, 1),
    ("mhc_pre", "portable", {"tokens": [1, 2, 16, 77], "width": [1024, 4096, 7168]}, 1),
    ("index_workspace", "portable", {"tokens": [1, 2, 16, 77], "requests": [1, 2, 16], "topk": [1, 512]}, 1),
    (
        "rope_cache_write",
        "portable",
        {"tokens": [1, 3, 16], "heads": [1, 16, 128], "pages": [1, 7], "page_size": [16, 80]},
        1,
    ),
    ("pack_seq", "portable", {"tokens": [1, 2, 16, 77], "requests": [1, 2, 16]}, 1),
    ("unpack_seq", "portable", {"tokens": [1, 2, 16, 77], "requests": [1, 2, 16]}, 1),
    ("inverse_rope_quantize", "portable", {"tokens": [1, 2, 16, 77], "heads": [16, 32, 128], "groups": [1, 8]}, 1),
    ("q_kv_norm", "portable", {"tokens": [1, 2, 16, 77]}, 1),
    ("rotate_and_cache", "portable", {**STEPS, "heads": [1, 16, 128], "page_size": [1, 64]}, 1),
    ("latent_rows", "portable", {"tokens": [1, 2, 16, 77], "pages": [1, 3, 16]}, 1),
    ("turboquant_decode", "portable", {**BATCHES, "columns": [1, 64, 3000], "pages": [1, 7], "gap": [10, 18]}, 2),
    ("turboquant_store", "portable", {"tokens": [1, 16, 700], "heads": [1, 2, 8], "pages": [1, 16], "gap": [2, 10]}, 1),
    ("turboquant_gather", "portable", {"tokens": [1, 16, 700], "requests": [1, 16], "gap": [2, 10]}, 1),
    ("rotate_heads", "portable", {"tokens": [1, 2, 16, 77], "heads": [1, 16, 128]}, 1),
]


@pytest.mark.parametrize("seed", mostly_full(range(2), 0))
@pytest.mark.parametrize(("operation", "backend", "numbers", "most"), SAME_CODE, ids=str)
def test_new_lengths_strides_and_batches_compile_nothing(record, operation, backend, numbers, most, seed):
    rng = random.Random(seed)
    variants: dict[str, set[str]] = {}
    for _ in range(12):
        for one in main_kernels(launches(record, operation, backend, **some(rng, **numbers))):
            variants.setdefault(one.name, set()).add(one.variant)
    assert variants
    assert {name: len(found) for name, found in variants.items() if len(found) > most} == {}


@pytest.mark.parametrize("backend", ["hopper", "portable"])
@pytest.mark.parametrize("heads", [16, 128])
def test_batch_invariant_is_the_same_machine_code_for_all_batches_and_tables(record, backend, heads):
    """Two variants of one kernel may round differently, since the compiler may or may not fuse products and sums."""
    variants: dict[str, set[str]] = {}
    for batch, columns in ((1, 1), (3, 5), (3, 45), (200, 63), (7, 3000)):
        call = {"batch": batch, "heads": heads, "columns": columns, "batch_invariant": True, "dtype": BF16}
        for one in launches(record, "dense_decode", backend, **call):
            variants.setdefault(one.name, set()).add(one.variant)
    assert variants
    assert {name: len(found) for name, found in variants.items()} == dict.fromkeys(variants, 1)
