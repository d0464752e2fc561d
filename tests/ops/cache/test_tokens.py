import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashlatte import kv_cache
from flashlatte.testing.draws import UNREACHED_PAGE

NAMES = st.sampled_from(kv_cache.FORMAT_NAMES)
PLAIN = ("bf16", "fp16", "fp32", "fp8")
INDEX_DTYPES = st.sampled_from([torch.int32, torch.int64])
FLOAT_DTYPES = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])
SEEDS = st.integers(0, 2**32)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def poisoned(name, pages, page_size, gap=0):
    """A cache of 0xFF bytes, which are NaN in every format, with ``gap`` unused tokens after each page."""
    cache = kv_cache.allocate(name, pages, page_size + gap)
    cache.view(torch.uint8).fill_(0xFF)
    return cache[:, :page_size]


def raw_tokens(cache, name=None):
    """The bytes of each slot, with its planes concatenated: uint8 [slots, bytes]."""
    layout = (
        kv_cache.infer_format(cache)
        if name is None
        else kv_cache.get_format(name, cache.shape[-1] if name in PLAIN else None)
    )
    return torch.cat([view.flatten(0, 1).view(torch.uint8) for view in layout.page_views(cache)], dim=-1)


def scale_of(name):
    return 0.05 if name == "fp8" else None


@given(
    name=NAMES,
    pages=st.integers(1, 4),
    page_size=st.integers(1, 5),
    gap=st.integers(0, 1),
    padding=st.integers(0, 2),
    split=st.booleans(),
    dtype=FLOAT_DTYPES,
    index_dtype=INDEX_DTYPES,
    seed=SEEDS,
)
def test_write_changes_the_named_slots_and_nothing_else(
    name, pages, page_size, gap, padding, split, dtype, index_dtype, seed
):
    layout = kv_cache.get_format(name)
    cache = poisoned(name, pages, page_size, gap)
    limit = pages * page_size
    slots = torch.randperm(limit, generator=generator(seed))[: limit // 2 + 1]
    outside = torch.tensor([-1, limit, -(2**31), 2**31 - 1])
    mapping = torch.cat((slots, outside))[torch.randperm(slots.numel() + 4, generator=generator(seed))]
    x = torch.randn(mapping.numel() + padding, layout.head_dim, generator=generator(seed)).to(dtype)
    x[mapping.numel() :] = torch.nan

    rows, rope = (x[:, : layout.latent_dim], x[:, layout.latent_dim :]) if split else (x, None)
    kv_cache.write(cache, mapping.to(index_dtype), rows, rope=rope, cache_format=name, scale=scale_of(name))

    expected = torch.full_like(raw_tokens(cache, name), 0xFF)
    records = kv_cache.quantize(x, name, scale=scale_of(name)).view(torch.uint8)
    for token, slot in enumerate(mapping.tolist()):
        if 0 <= slot < limit:
            expected[slot] = records[token]
    assert raw_tokens(cache, name).equal(expected)
    if gap:
        unused = cache.as_strided((pages, cache.shape[-1]), (cache.stride(0), 1), page_size * cache.shape[-1])
        assert name == "model1" or unused.view(torch.uint8).eq(0xFF).all()


@pytest.mark.parametrize("scale_rounding", ["power_of_two", "exact"])
def test_write_rounds_v32_scales_as_given(scale_rounding):
    x = torch.randn(2, 576, generator=generator(0))
    cache = kv_cache.allocate("v32", 1, 2)
    kv_cache.write(cache, torch.arange(2), x, scale_rounding=scale_rounding)
    assert raw_tokens(cache).equal(kv_cache.quantize(x, "v32", scale_rounding=scale_rounding))


def test_writing_no_tokens_changes_nothing():
    cache, no_slots = poisoned("v32", 1, 2), torch.empty(0, dtype=torch.int64)
    kv_cache.write(cache, no_slots, torch.zeros(3, 576))
    kv_cache.write(cache, no_slots, torch.zeros(0, 576))
    kv_cache.write(cache, no_slots, torch.zeros(0, 512), rope=torch.zeros(0, 64))
    assert raw_tokens(cache).eq(0xFF).all()


def test_a_scale_tensor_is_the_number():
    x = torch.randn(3, 40, generator=generator(0))
    caches = [kv_cache.allocate("fp8", 1, 3, head_dim=40) for _ in range(2)]
    for cache, scale in zip(caches, (0.25, torch.tensor([0.25])), strict=True):
        kv_cache.write(cache, torch.arange(3), x, scale=scale)
    assert raw_tokens(caches[0]).equal(raw_tokens(caches[1]))
    assert kv_cache.read(caches[0], torch.arange(3), scale=torch.tensor(0.25)).equal(
        kv_cache.dequantize(kv_cache.quantize(x, "fp8", scale=0.25), "fp8", scale=0.25)
    )


@given(name=NAMES, page_size=st.integers(1, 5), index_dtype=INDEX_DTYPES, dtype=FLOAT_DTYPES, seed=SEEDS)
def test_read_returns_the_rows_at_slots_and_zeros_outside(name, page_size, index_dtype, dtype, seed):
    layout = kv_cache.get_format(name)
    rows = torch.randn(3, page_size, 1, layout.head_dim, generator=generator(seed))
    cache = kv_cache.pack(rows, name, scale=scale_of(name))
    slots = torch.randint(-2, 3 * page_size + 2, (2, 4), generator=generator(seed)).to(index_dtype)
    actual = kv_cache.read(cache, slots, cache_format=name, scale=scale_of(name), dtype=dtype)
    whole = kv_cache.unpack(cache, name, scale=scale_of(name), dtype=dtype)
    assert actual.dtype == dtype
    for i in range(2):
        for j in range(4):
            slot = int(slots[i, j])
            inside = 0 <= slot < 3 * page_size
            expected = (
                whole[slot // page_size, slot % page_size, 0] if inside else torch.zeros(layout.head_dim).to(dtype)
            )
            assert actual[i, j].equal(expected)


@given(
    name=NAMES,
    page_size=st.integers(1, 5),
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    starts=st.booleans(),
    extra_rows=st.integers(0, 2),
    index_dtype=INDEX_DTYPES,
    dtype=FLOAT_DTYPES,
    seed=SEEDS,
)
def test_gather_lays_requests_one_after_the_other(
    name, page_size, lengths, starts, extra_rows, index_dtype, dtype, seed
):
    layout = kv_cache.get_format(name)
    num_pages, columns = 6, 3
    rows = torch.randn(num_pages, page_size, 1, layout.head_dim, generator=generator(seed))
    cache = kv_cache.pack(rows, name, scale=scale_of(name))
    candidates = torch.tensor([*range(num_pages), -1, num_pages, UNREACHED_PAGE])
    table = candidates[torch.randint(0, len(candidates), (len(lengths), columns), generator=generator(seed))]
    begins = torch.randint(0, 2 * page_size, (len(lengths),), generator=generator(seed)) if starts else None
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    total = sum(lengths)
    out = torch.full((total + extra_rows, layout.head_dim + 3), 7.0, dtype=dtype)[:, : layout.head_dim]

    result = kv_cache.gather(
        cache,
        table.to(index_dtype),
        cu_seqlens.to(index_dtype),
        seq_starts=None if begins is None else begins.to(index_dtype),
        cache_format=name,
        scale=scale_of(name),
        out=out if out.shape[0] else None,
        dtype=dtype,
    )

    whole = kv_cache.unpack(cache, name, scale=scale_of(name), dtype=dtype)
    row = 0
    for request, length in enumerate(lengths):
        for index in range(length):
            position = index + (0 if begins is None else int(begins[request]))
            column = position // page_size
            page = int(table[request, column]) if column < columns else -1
            expected = torch.zeros(layout.head_dim, dtype=dtype)
            if 0 <= page < num_pages:
                expected = whole[page, position % page_size, 0]
            assert result[row].equal(expected)
            row += 1
    assert result[total:].eq(7.0).all()


def test_boundaries_without_an_end_give_the_last_request_the_rest():
    cache = kv_cache.pack(torch.randn(3, 4, 1, 40, generator=generator(0)), "bf16")
    table = torch.tensor([[1, -1], [0, 2]])
    closed = kv_cache.gather(cache, table, torch.tensor([1, 3, 9]), total_tokens=9)
    given = kv_cache.gather(cache, table, torch.tensor([1, 3]), total_tokens=9)
    assert given[3:].eq(cache[[0, 2]].flatten(0, 2)[:6]).all()
    assert given.equal(closed)
    records = kv_cache.gather_records(cache, table, torch.tensor([1, 3]), 9)
    assert records.equal(given)


def test_gather_allocates_total_tokens_or_the_end_of_cu_seqlens():
    cache = kv_cache.pack(torch.randn(2, 3, 1, 40, generator=generator(0)), "bf16")
    table, cu_seqlens = torch.tensor([[1, 0]]), torch.tensor([0, 4])
    gathered = kv_cache.gather(cache, table, cu_seqlens)
    assert gathered.equal(cache[[1, 0]].flatten(0, 2)[:4])
    padded = kv_cache.gather(cache, table, cu_seqlens, total_tokens=6, dtype=torch.float32)
    assert padded.dtype == torch.float32
    assert padded[:4].equal(gathered.float())
    assert padded[4:].eq(0).all()
    assert kv_cache.gather(cache, table, torch.tensor([0, 0])).shape == (0, 40)


def test_gather_of_nan_rows_leaves_the_others():
    rows = torch.randn(2, 3, 1, 512, generator=generator(0))
    rows[1] = torch.nan
    cache = kv_cache.pack(rows, "model1")
    gathered = kv_cache.gather(cache, torch.tensor([[0, 1]]), torch.tensor([0, 3]))
    assert gathered.isfinite().all()


CACHE = kv_cache.allocate("v32", 2, 3)
FP8_CACHE = kv_cache.allocate("fp8", 2, 3)
SLOTS, X = torch.arange(2), torch.zeros(2, 576)
META = torch.device("meta")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"cache": [0]}, TypeError, "^cache must be a tensor, got list$"),
        ({"cache": CACHE[..., :500]}, ValueError, "^cache must be a .*500 wide$"),
        ({"cache_format": "v33"}, ValueError, "^cache_format must be one of"),
        ({"cache": FP8_CACHE[:1].expand(4, -1, -1, -1)}, ValueError, "^cache must not be an expanded tensor"),
        ({"x": [0]}, TypeError, "^x must be a tensor, got list$"),
        ({"x": X.int()}, TypeError, "^x must be bfloat16 or float16 or float32, got int32$"),
        ({"x": X[0]}, ValueError, r"^x must have shape \[T, width\]"),
        ({"x": X[:, :512]}, ValueError, "^x must be 576 wide for format v32"),
        ({"x": X.to(META)}, ValueError, "^x must be on cpu like the other arguments, got meta$"),
        ({"x": X.T.contiguous().T}, ValueError, "^x must have last stride 1"),
        ({"x": X[:, :512], "rope": X[:, :63]}, ValueError, "^x and rope must be 512 and 64 wide .* got 512 and 63$"),
        ({"x": X[:, :512], "rope": X[:1, :64]}, ValueError, "^rope must have x's leading shape"),
        ({"x": X[:, :512], "rope": X[:, :64].bfloat16()}, TypeError, "^rope must be float32, got bfloat16$"),
        ({"x": X[:, :512], "rope": X[:, :64].to(META)}, ValueError, "^rope must be on cpu"),
        ({"slot_mapping": [0]}, TypeError, "^slot_mapping must be a tensor, got list$"),
        ({"slot_mapping": SLOTS.float()}, TypeError, "^slot_mapping must be int32 or int64, got float32$"),
        ({"slot_mapping": SLOTS[None]}, ValueError, r"^slot_mapping must have shape \[n\]"),
        (
            {"slot_mapping": torch.arange(3)},
            ValueError,
            r"^slot_mapping must not be longer than x \(2 tokens\), got 3$",
        ),
        ({"slot_mapping": SLOTS.to(META)}, ValueError, "^slot_mapping must be on cpu"),
        ({"scale": 2.0}, ValueError, "^scale must be None for format v32"),
        ({"cache": FP8_CACHE, "scale": torch.ones(1).to(META)}, ValueError, "^scale must be on cpu like the cache"),
        ({"cache": FP8_CACHE, "scale": -1.0}, ValueError, "^scale must be a finite number above 0, got -1"),
        ({"scale_rounding": "down"}, ValueError, "^scale_rounding must be one of power_of_two, exact, got 'down'$"),
        ({"backend": "cuda"}, ValueError, "^backend must be one of"),
        ({"backend": "hopper"}, ValueError, "^backend='hopper' cannot serve"),
    ],
)
def test_write_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        kv_cache.write(**({"cache": CACHE, "slot_mapping": SLOTS, "x": X} | change))


TABLE, CU_SEQLENS = torch.tensor([[0, 1], [1, 0]]), torch.tensor([0, 2, 5])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"cache": [0]}, TypeError, "^cache must be a tensor, got list$"),
        ({"block_table": [[0]]}, TypeError, "^block_table must be a tensor, got list$"),
        ({"block_table": TABLE.float()}, TypeError, "^block_table must be int32 or int64, got float32$"),
        ({"block_table": TABLE[0]}, ValueError, r"^block_table must have shape \[b, max_pages\]"),
        ({"block_table": TABLE.to(META)}, ValueError, "^block_table must be on cpu"),
        ({"cu_seqlens": CU_SEQLENS[:1]}, ValueError, r"^cu_seqlens must have shape \[3\].*got \[1\]$"),
        (
            {"cu_seqlens": CU_SEQLENS[:2]},
            ValueError,
            r"^cu_seqlens must have shape \[3\] if total_tokens and out are None.*got \[2\]$",
        ),
        ({"cu_seqlens": CU_SEQLENS.float()}, TypeError, "^cu_seqlens must be int32 or int64, got float32$"),
        ({"cu_seqlens": CU_SEQLENS.to(META)}, ValueError, "^cu_seqlens must be on cpu"),
        ({"seq_starts": CU_SEQLENS}, ValueError, r"^seq_starts must have shape \[2\].*got \[3\]$"),
        ({"seq_starts": SLOTS.float()}, TypeError, "^seq_starts must be int32 or int64"),
        ({"scale": 1.0}, ValueError, "^scale must be None for format"),
        ({"dtype": torch.int32}, TypeError, "^dtype must be bfloat16 or float16 or float32, got"),
        ({"total_tokens": -1}, ValueError, "^total_tokens must be at least 0, got -1$"),
        ({"total_tokens": 2.0}, TypeError, "^total_tokens must be an int, got float$"),
        (
            {"total_tokens": None, "cu_seqlens": -CU_SEQLENS},
            ValueError,
            "^cu_seqlens must end at 0 or above, got -",
        ),
        (
            {"total_tokens": 4, "out": torch.zeros(5, 576)},
            ValueError,
            "^total_tokens must be out's 5 rows or None, got 4$",
        ),
        ({"out": torch.zeros(5, 512)}, ValueError, r"^out must have shape \[rows, 576\].*got \[5, 512\]$"),
        ({"out": torch.zeros(5, 576).int()}, TypeError, "^out must be .*got int32$"),
        ({"out": torch.zeros(576, 5).T}, ValueError, "^out must have last stride 1"),
        ({"out": torch.zeros(5, 576, device=META)}, ValueError, "^out must be on cpu"),
        ({"backend": "cuda"}, ValueError, "^backend must be one of"),
        ({"backend": "hopper"}, ValueError, "^backend='hopper' cannot serve"),
    ],
)
def test_gather_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        kv_cache.gather(**({"cache": CACHE, "block_table": TABLE, "cu_seqlens": CU_SEQLENS} | change))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"cache": [0]}, TypeError, "^cache must be a tensor, got list$"),
        ({"slots": [0]}, TypeError, "^slots must be a tensor, got list$"),
        ({"slots": SLOTS.float()}, TypeError, "^slots must be int32 or int64, got float32$"),
        ({"slots": SLOTS.to(META)}, ValueError, "^slots must be on cpu"),
        ({"scale": 1.0}, ValueError, "^scale must be None for format"),
    ],
)
def test_read_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        kv_cache.read(**({"cache": CACHE, "slots": SLOTS} | change))


def test_reading_no_slots_gives_no_rows():
    assert kv_cache.read(CACHE, torch.empty(0, 3, dtype=torch.int32)).shape == (0, 3, 576)
