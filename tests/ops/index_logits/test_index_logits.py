"""Index logits, ragged and paged, compared with float64 over the dequantized values, on both backends."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.torch_op import opcheck

from flashlatte import kv_cache
from flashlatte.kv_cache.index_formats import INDEX_FORMATS, index_format
from flashlatte.ops.index_logits import api, index_logits, paged_index_logits, sparse, sparse_index_logits
from flashlatte.ops.index_quantize import index_gather, index_quantize

BACKENDS = ["reference", pytest.param("portable", marks=pytest.mark.interpreter)]
HEADS = st.sampled_from([1, 8, 20, 32, 64, 128])
GARBAGE = (-1, -(2**31), 2**31 - 1, 10**6)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed):
    return torch.randn(shape, generator=generator(seed))


def oracle(q, keys, weights):
    """float64 [M, N], computed head by head."""
    logits = torch.zeros(len(q), len(keys), dtype=torch.float64)
    for head in range(q.shape[1]):
        products = q[:, head].double() @ keys.double().T
        logits += weights[:, head].double().unsqueeze(1) * products.clamp_min(0)
    return logits


def magnitude(q, keys, weights):
    """Σ |weight| · |q| · |k|, to which float32's rounding error is relative."""
    return oracle(q.double().abs(), keys.abs(), weights.abs())


def assert_logits(actual, expected, size, dtype):
    assert actual.dtype == dtype
    expected = expected.to(actual.device)
    empty = expected.isinf()
    assert actual[empty].eq(-torch.inf).all()
    error = (actual.double() - expected)[~empty].abs()
    tolerance = 2e-6 * size[~empty] + (2.0**-8 * expected[~empty].abs() if dtype == torch.bfloat16 else 0)
    assert (error <= tolerance).all()


def query_dtype(kind, fp8_queries):
    if kind == "index_fp32":
        return torch.float32
    return torch.float8_e4m3fn if fp8_queries else torch.bfloat16


def contiguous_keys(kind, num_keys, head_dim, seed):
    """(k, k_scale) as index_logits takes them, and the float64 values."""
    x = normal(num_keys, head_dim, seed=seed)
    layout = index_format(kind, head_dim)
    cache = kv_cache.allocate(layout, 1, num_keys)
    index_quantize(cache, torch.arange(num_keys), x, backend="reference")
    k, scale = index_gather(
        cache,
        torch.zeros(1, 1, dtype=torch.int32),
        torch.tensor([0, num_keys]),
        num_keys,
        head_dim=head_dim,
        backend="reference",
    )
    return k, scale, kv_cache.unpack(cache, layout, dtype=torch.float32)[0, :, 0].double()


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    rows=st.integers(1, 9),
    num_keys=st.integers(1, 90),
    heads=HEADS,
    head_dim=st.sampled_from([32, 64, 128]),
    kind=st.sampled_from(list(INDEX_FORMATS)),
    fp8_queries=st.booleans(),
    max_keys=st.sampled_from([None, 1, 40, 200]),
    clean=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 1000),
)
def test_ragged(backend, rows, num_keys, heads, head_dim, kind, fp8_queries, max_keys, clean, dtype, index_dtype, seed):
    k, k_scale, keys = contiguous_keys(kind, num_keys, head_dim, seed)
    q = normal(rows, heads, head_dim, seed=seed + 1).to(query_dtype(kind, fp8_queries))
    weights = normal(rows, heads + 3, seed=seed + 2)[:, :heads]
    start = torch.randint(-5, num_keys + 5, (rows,), generator=generator(seed + 3))
    end = torch.randint(-5, num_keys + 5, (rows,), generator=generator(seed + 4))
    # Keys that are visible to no query are poisoned.
    seen = [set(range(max(s, 0), min(e, num_keys))) for s, e in zip(start.tolist(), end.tolist(), strict=True)]
    unseen = sorted(set(range(num_keys)) - set().union(*seen))
    if kind == "index_mxfp4":
        assert k_scale is not None
        k_scale[unseen] = 255
    elif k.dtype.itemsize == 1:
        k.view(torch.uint8)[unseen] = 127
    else:
        k[unseen] = torch.nan

    width = num_keys if max_keys is None else max_keys
    out = torch.full((rows, width + 1), 77.0).to(dtype)[:, :width]
    logits = index_logits(
        q,
        k,
        weights,
        start.to(index_dtype),
        end.to(index_dtype),
        k_scale=k_scale,
        clean=clean,
        max_keys=max_keys,
        out=out,
        backend=backend,
    )
    assert logits is out
    full, size = oracle(q, keys, weights), magnitude(q, keys, weights)
    expected = torch.full((rows, width), -torch.inf, dtype=torch.float64)
    bound = torch.ones(rows, width, dtype=torch.float64)
    for row, visible in enumerate(seen):
        for key in visible:
            column = key - max(int(start[row]), 0) if max_keys is not None else key
            if column < width:
                expected[row, column], bound[row, column] = full[row, key], size[row, key]
    if not clean:
        assert logits[expected.isinf()].eq(77.0).all()
        logits = logits.masked_fill(expected.isinf(), -torch.inf)
    assert_logits(logits, expected, bound, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    lengths=st.lists(st.integers(-3, 60), min_size=1, max_size=5),
    next_n=st.integers(1, 5),
    page_size=st.integers(1, 40),
    heads=HEADS,
    head_dim=st.sampled_from([32, 128]),
    kind=st.sampled_from(list(INDEX_FORMATS)),
    fp8_queries=st.booleans(),
    per_token=st.booleans(),
    max_keys=st.sampled_from([None, 7, 100]),
    clean=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
    gap=st.sampled_from([0, 3, 16]),
    seed=st.integers(0, 1000),
)
def test_paged(
    backend,
    lengths,
    next_n,
    page_size,
    heads,
    head_dim,
    kind,
    fp8_queries,
    per_token,
    max_keys,
    clean,
    dtype,
    index_dtype,
    gap,
    seed,
):
    batch = len(lengths)
    columns = max(1, *(-(-length // page_size) for length in lengths))
    layout = index_format(kind, head_dim)
    num_pages = batch * columns + 1
    stride = page_size * layout.record_width + gap
    # Pages of no request, and keys after the end of a request, are poisoned.
    storage = torch.full((num_pages * stride * layout.record_dtype.itemsize,), 255, dtype=torch.uint8)
    cache = storage.view(layout.record_dtype).as_strided(
        (num_pages, page_size, 1, layout.record_width), (stride, layout.record_width, layout.record_width, 1)
    )
    table = torch.randperm(num_pages, generator=generator(seed))[:-1].view(batch, columns)
    keys = normal(batch, columns * page_size, head_dim, seed=seed + 1)
    for request, length in enumerate(lengths):
        position = torch.arange(max(length, 0))
        slots = table[request, position // page_size] * page_size + position % page_size
        index_quantize(cache, slots, keys[request, position], backend="reference")
    stored = torch.stack(
        [kv_cache.unpack(cache[pages], layout, dtype=torch.float32).flatten(0, 1)[:, 0] for pages in table]
    ).double()
    lost = seed % 3 == 0 and lengths[0] > 0
    shown = table.clone()
    if lost:
        shown[0, 0] = GARBAGE[seed % 4]
    for request, length in enumerate(lengths):
        shown[request, -(-max(length, 0) // page_size) :] = GARBAGE[seed % 4]

    q = normal(batch, next_n, heads, head_dim, seed=seed + 2)
    q = q.to(query_dtype(kind, fp8_queries))
    weights = normal(batch * next_n, heads, seed=seed + 3)
    limits = torch.tensor(lengths).unsqueeze(1) - next_n + 1 + torch.arange(next_n)
    if per_token:
        limits = torch.randint(-2, 61, (batch, next_n), generator=generator(seed + 4))
        limits = limits.minimum(torch.tensor(lengths).unsqueeze(1))
    cache_seqlens = (limits if per_token else torch.tensor(lengths)).to(index_dtype)
    width = columns * page_size if max_keys is None else max_keys
    out = torch.full((batch * next_n, width), 77.0, dtype=dtype)
    logits = paged_index_logits(
        q,
        cache,
        weights,
        cache_seqlens,
        shown.to(index_dtype),
        max_keys=max_keys,
        clean=clean,
        out=out,
        backend=backend,
    )
    expected = torch.full((batch, next_n, width), -torch.inf, dtype=torch.float64)
    bound = torch.ones(batch, next_n, width, dtype=torch.float64)
    inside = torch.arange(width) < limits.clamp(max=columns * page_size).unsqueeze(-1)
    for request in range(batch):
        rows = slice(request * next_n, (request + 1) * next_n)
        visible = min(width, columns * page_size)
        known = stored[request, :visible].nan_to_num(0.0)
        if lost and request == 0:
            known[:page_size] = 0.0
        expected[request, :, :visible] = oracle(q[request], known, weights[rows])
        bound[request, :, :visible] = magnitude(q[request], known, weights[rows])
    expected[~inside] = -torch.inf
    flat_inside = inside.flatten(0, 1)
    if not clean:
        assert logits[~flat_inside].eq(77.0).all()
        logits = logits.masked_fill(~flat_inside, -torch.inf)
    assert_logits(logits, expected.flatten(0, 1), bound.flatten(0, 1), dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("max_keys", [None, 2])
def test_ranges_that_begin_or_end_far_outside(backend, max_keys):
    far = 2**63 - 1
    start, end = torch.tensor([far, -far, far, -far]), torch.tensor([far, far, 0, -far])
    q, k, weights = torch.ones(4, 1, 32), torch.ones(3, 32), torch.ones(4, 1)
    logits = index_logits(q, k, weights, start, end, max_keys=max_keys, backend=backend)
    expected = torch.full_like(logits, -torch.inf)
    expected[1] = 32.0
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("length", "keys"), [(-(2**63), 0), (-(2**32) + 3, 0), (2**63 - 1, 4)])
def test_lengths_far_outside(backend, length, keys):
    q, cache, weights = torch.ones(1, 3, 1, 32), torch.ones(2, 2, 1, 32), torch.ones(3, 1)
    logits = paged_index_logits(q, cache, weights, torch.tensor([length]), torch.tensor([[0, 1]]), backend=backend)
    assert (logits == 32.0).sum(dim=1).tolist() == [keys] * 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_key_that_is_nan_has_a_logit_that_is_nan(backend):
    q, k = torch.ones(1, 8, 32, dtype=torch.bfloat16), torch.ones(4, 32, dtype=torch.bfloat16)
    k[2, 5] = torch.nan
    logits = index_logits(q, k, torch.ones(1, 8), torch.tensor([1]), torch.tensor([4]), backend=backend)
    assert logits.isnan().tolist() == [[False, False, True, False]]
    assert logits[0, 0] == -torch.inf


@pytest.mark.interpreter
def test_requests_beyond_one_block_of_lengths(monkeypatch):
    from flashlatte.ops.index_logits.portable import paged

    monkeypatch.setattr(paged, "REQUESTS", 4)
    batch, page_size = 11, 16
    lengths = torch.tensor([0, 33, 0, 0, 5, 64, 16, 0, 17, 1, 0])
    cache = kv_cache.allocate(index_format("index_bf16", 32), batch * 4, page_size)
    cache.copy_(normal(*cache.shape, seed=0))
    table = torch.arange(batch * 4, dtype=torch.int32).view(batch, 4)
    q = normal(batch, 1, 8, 32, seed=1).bfloat16()
    weights = normal(batch, 8, seed=2)
    results = [
        paged_index_logits(q, cache, weights, lengths, table, backend=backend) for backend in ("portable", "reference")
    ]
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", [None, "reference"])
def test_empty_work(backend):
    none = torch.empty(0, dtype=torch.int32)
    q, k = torch.empty(0, 8, 32), torch.zeros(4, 32)
    assert index_logits(q, k, torch.empty(0, 8), none, none, backend=backend).shape == (0, 4)
    q, ends = torch.ones(2, 8, 32), torch.tensor([4, 4])
    logits = index_logits(q, k[:0], torch.ones(2, 8), ends * 0, ends, max_keys=3, backend=backend)
    assert logits.eq(-torch.inf).all()
    cache = kv_cache.allocate(index_format("index_bf16", 32), 1, 8)
    q = torch.empty(0, 1, 8, 32, dtype=torch.bfloat16)
    table = torch.empty(0, 2, dtype=torch.int32)
    assert paged_index_logits(q, cache, torch.empty(0, 8), none, table, backend=backend).shape == (0, 16)


def ragged_call(**change):
    arguments: dict[str, Any] = {
        "q": torch.zeros(3, 8, 32, dtype=torch.bfloat16),
        "k": torch.zeros(5, 32, dtype=torch.bfloat16),
        "weights": torch.zeros(3, 8),
        "key_start": torch.zeros(3, dtype=torch.int32),
        "key_end": torch.full((3,), 5),
    }
    return index_logits(**(arguments | change))


FP8 = torch.zeros(5, 32).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": torch.zeros(3, 8, 48).bfloat16()}, ValueError, "q must have a head dim of 32, 64 or 128, got 48"),
        ({"q": torch.zeros(3, 129, 32).bfloat16()}, ValueError, "q must have 1 to 128 heads, got 129"),
        ({"q": torch.zeros(3, 8, 32)}, TypeError, "k must be float32 if and only if q is, got bfloat16"),
        ({"k": FP8}, TypeError, "k_scale must be a tensor, got NoneType"),
        ({"k": FP8, "k_scale": torch.ones(4)}, ValueError, r"k_scale must have shape \[5\]"),
        ({"k_scale": torch.ones(5)}, ValueError, "k_scale must be None for bfloat16 keys"),
        ({"weights": torch.zeros(3, 8).bfloat16()}, TypeError, "weights must be float32, got bfloat16"),
        ({"key_end": torch.zeros(3)}, TypeError, "key_end must be int32 or int64"),
        ({"key_start": torch.zeros(4, dtype=torch.int32)}, ValueError, "key_start must have shape"),
        ({"max_keys": 0}, ValueError, "max_keys must be at least 1, got 0"),
        ({"out": torch.zeros(3, 4)}, ValueError, r"out must have shape \[3, 5\]"),
        ({"dtype": torch.float16}, TypeError, "dtype must be float32 or bfloat16"),
        ({"clean": 1}, TypeError, "clean must be True or False"),
    ],
)
def test_ragged_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        ragged_call(**change)


def paged_call(**change):
    arguments: dict[str, Any] = {
        "q": torch.zeros(2, 1, 8, 128, dtype=torch.bfloat16),
        "cache": torch.zeros(4, 8, 1, 132, dtype=torch.uint8),
        "weights": torch.zeros(2, 8),
        "cache_seqlens": torch.tensor([3, 9]),
        "block_table": torch.zeros(2, 2, dtype=torch.int32),
    }
    return paged_index_logits(**(arguments | change))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": torch.zeros(2, 1, 8, 128)}, TypeError, "q must be float32 if and only if the index keys are"),
        ({"cache": torch.zeros(4, 8, 1, 133, dtype=torch.uint8)}, ValueError, "cache must hold index keys of 128"),
        ({"weights": torch.zeros(1, 8)}, ValueError, r"weights must have shape \[2, 8\]"),
        (
            {"cache_seqlens": torch.zeros(2, 2, dtype=torch.int32)},
            ValueError,
            r"cache_seqlens must have shape \[2, 1\]",
        ),
        ({"block_table": torch.zeros(3, 2, dtype=torch.int32)}, ValueError, "block_table must have shape"),
        ({"max_keys": -1}, ValueError, "max_keys must be at least 1, got -1"),
    ],
)
def test_paged_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        paged_call(**change)


def test_opcheck():
    opcheck(api, "index_logits", ragged_call)
    opcheck(api, "paged_index_logits", paged_call)
    opcheck(sparse, "sparse_index_logits", sparse_call)


def sparse_call(**change):
    arguments: dict[str, Any] = {
        "q": torch.ones(3, 4, 32),
        "k": torch.ones(9, 32),
        "weights": torch.ones(3, 4),
        "first_key": torch.zeros(3, 2, dtype=torch.int64),
        "num_keys": torch.ones(3, 2, dtype=torch.int64),
        "block_size": 4,
    }
    return sparse_index_logits(**(arguments | change))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"first_key": torch.zeros(2, 2, dtype=torch.int64)}, ValueError, r"^first_key must have shape \[3, S\]"),
        ({"num_keys": torch.zeros(3, 3, dtype=torch.int64)}, ValueError, r"^num_keys must have shape \[3, 2\]"),
        ({"block_size": 0}, ValueError, "^block_size must be at least 1, got 0$"),
        ({"k": torch.zeros(2, 4, 1, 132, dtype=torch.uint8)}, ValueError, "^k must hold index keys of 32 values"),
        (
            {"k": torch.zeros(2, 4, 1, 36, dtype=torch.uint8)},
            TypeError,
            "^q must be float32 if and only if the index keys are, got float32 over index_fp8",
        ),
        ({"k": torch.zeros(2, 4, 1, 32), "k_scale": torch.ones(8)}, ValueError, "^k_scale must be None for a paged"),
        ({"out": torch.zeros(3, 9)}, ValueError, r"^out must have shape \[3, 8\]"),
        ({"backend": "hopper"}, ValueError, "hopper"),
    ],
)
def test_errors_of_candidate_blocks(change, error, message):
    with pytest.raises(error, match=message):
        sparse_call(**change)


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    rows=st.integers(1, 4),
    num_blocks=st.integers(1, 5),
    block_size=st.sampled_from([1, 3, 8, 16]),
    heads=HEADS,
    kind=st.sampled_from(list(INDEX_FORMATS)),
    paged=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_candidate_blocks(backend, rows, num_blocks, block_size, heads, kind, paged, dtype, seed):
    total, page_size = 60, 12
    q = normal(rows, heads, 64, seed=seed).to(query_dtype(kind, seed % 2))
    weights = normal(rows, heads, seed=seed + 1)
    if paged:
        layout = index_format(kind, 64)
        k, k_scale = kv_cache.allocate(layout, total // page_size, page_size), None
        index_quantize(k, torch.arange(total), normal(total, 64, seed=seed + 2), backend="reference")
        keys = kv_cache.unpack(k, layout, dtype=torch.float32).flatten(0, 2).double()
    else:
        k, k_scale, keys = contiguous_keys(kind, total, 64, seed + 2)
    first = torch.randint(-5, total + 5, (rows, num_blocks), generator=generator(seed + 3)).int()
    num = torch.randint(-2, 20, (rows, num_blocks), generator=generator(seed + 4)).int()
    logits = sparse_index_logits(
        q, k, weights, first, num, block_size=block_size, k_scale=k_scale, dtype=dtype, backend=backend
    )
    offset = torch.arange(block_size)
    position = (first.unsqueeze(2) + offset).flatten(1).long()
    seen = (offset < num.unsqueeze(2)).flatten(1) & (position >= 0) & (position < total)
    position = position.where(seen, 0)
    expected = oracle(q, keys, weights).gather(1, position).where(seen, -torch.inf)
    assert_logits(logits, expected, magnitude(q, keys, weights).gather(1, position), dtype)
