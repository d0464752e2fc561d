# Wrong arguments are given on purpose.
# pyright: reportArgumentType=false

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashlatte import kv_cache
from flashlatte.testing.draws import UNREACHED_PAGE

NAMES = kv_cache.FORMAT_NAMES


def draw_cache(name, pages=4, page_size=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return kv_cache.pack(
        torch.randn(pages, page_size, 1, kv_cache.get_format(name).head_dim, generator=generator), name
    )


def raw(cache):
    return cache.view(torch.uint8)


def unpacked(cache, name=None):
    return kv_cache.unpack(cache, name, dtype=torch.float32)


@pytest.mark.parametrize("name", NAMES)
def test_copy_blocks_copies_whole_pages_and_may_exchange_them(name):
    cache = draw_cache(name)
    before = unpacked(cache, name)
    kv_cache.copy_blocks(cache, [0, 1, 0], [1, 0, 3])
    assert unpacked(cache, name).equal(before[[1, 0, 2, 0]])


def test_copy_blocks_takes_a_cache_for_each_layer_and_tensors_of_pages():
    caches = [draw_cache("v32", seed=0), draw_cache("bf16", pages=6, seed=1)]
    before = [unpacked(cache) for cache in caches]
    kv_cache.copy_blocks(caches, torch.tensor([2], dtype=torch.int32), torch.tensor([0]))
    for cache, rows in zip(caches, before, strict=True):
        assert unpacked(cache)[0].equal(rows[2])
        assert unpacked(cache)[1:].equal(rows[1:])


def test_copy_blocks_takes_each_page_of_an_iterator_for_every_cache():
    caches = [draw_cache("v32", seed=seed) for seed in (0, 1)]
    before = [unpacked(cache) for cache in caches]
    kv_cache.copy_blocks(caches, iter([2, 0]), iter([3, 1]))
    for cache, rows in zip(caches, before, strict=True):
        assert unpacked(cache).equal(rows[[0, 0, 2, 2]])


def test_copy_blocks_writes_nothing_where_one_cache_has_no_such_page():
    caches = [draw_cache("v32"), draw_cache("v32", pages=2)]
    before = raw(caches[0]).clone()
    with pytest.raises(ValueError, match=r"^src_pages must be pages from 0 to 1, got 2$"):
        kv_cache.copy_blocks(caches, [2], [0])
    assert raw(caches[0]).equal(before)


def test_pages_may_be_numpys():
    cache = draw_cache("v32")
    before = unpacked(cache)
    kv_cache.copy_blocks(cache, np.array([0, 1]), list(np.array([2, 3])))
    assert unpacked(cache).equal(before[[0, 1, 0, 1]])


def test_copy_blocks_of_no_pages_changes_nothing():
    cache = draw_cache("v32")
    before = raw(cache).clone()
    kv_cache.copy_blocks(cache, [], [])
    assert raw(cache).equal(before)


@pytest.mark.parametrize("name", NAMES)
def test_swap_blocks_moves_pages_to_another_cache(name):
    source, target = draw_cache(name, pages=3), draw_cache(name, pages=5, seed=1)
    rows, before = unpacked(source, name), unpacked(target, name)
    kv_cache.swap_blocks(source, target, [2, 0], [0, 4])
    assert unpacked(target, name).equal(torch.stack((rows[2], before[1], before[2], before[3], rows[0])))
    assert unpacked(source, name).equal(rows)


@given(
    page_size=st.integers(1, 5),
    shape=st.sampled_from([(3,), (3, 4), (3, 2, 2)]),
    by_request_id=st.booleans(),
    position_dtype=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 2**32),
)
def test_to_cache_indices(page_size, shape, by_request_id, position_dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    pages = torch.tensor([0, 1, 5, 7, -1, -3])
    table = pages[torch.randint(0, len(pages), (3, 4), generator=generator)].to(torch.int32)
    positions = torch.randint(-2, 4 * page_size + 3, shape, generator=generator).to(position_dtype)
    requests = torch.randint(-1, 4, (3,), generator=generator) if by_request_id else torch.arange(3)
    actual = kv_cache.to_cache_indices(positions, table, page_size, request_ids=requests if by_request_id else None)

    assert actual.dtype == torch.int32
    assert actual.shape == positions.shape
    for row, request in enumerate(requests.tolist()):
        for position, index in zip(positions[row].flatten().tolist(), actual[row].flatten().tolist(), strict=True):
            expected = -1
            if 0 <= request < 3 and 0 <= position < 4 * page_size:
                page = int(table[request, position // page_size])
                if page >= 0:
                    expected = page * page_size + position % page_size
            assert index == expected


@pytest.mark.parametrize("page_size", [1, 2, 3, 64])
def test_an_index_that_does_not_fit_the_dtype_is_invalid_rather_than_wrapped(page_size):
    table = torch.tensor([[UNREACHED_PAGE, 2**26, 2**25 - 1]])
    positions = torch.tensor([[0, page_size, 2 * page_size]])
    exact = kv_cache.to_cache_indices(positions, table, page_size, dtype=torch.int64)
    assert exact.tolist() == [[UNREACHED_PAGE * page_size, 2**26 * page_size, (2**25 - 1) * page_size]]
    expected = [[index if index < 2**31 else -1 for index in exact[0].tolist()]]
    assert kv_cache.to_cache_indices(positions, table, page_size).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_page_whose_slots_would_wrap_round_64_bits_is_none(dtype):
    table = torch.tensor([[2**62, 2**61, 2**63 - 1, 3]])
    assert kv_cache.to_cache_indices(torch.tensor([[0, 4, 11, 13]]), table, 4, dtype=dtype).tolist() == [
        [-1, -1, -1, 13]
    ]


CACHE, OTHER = draw_cache("v32"), draw_cache("v32", pages=2)
ONE_PAGE = OTHER[:1].expand(2, -1, -1, -1)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: kv_cache.copy_blocks([[0]], [0], [1]), TypeError, "^caches must be a tensor, got list$"),
        (lambda: kv_cache.copy_blocks(3, [0], [1]), TypeError, "^caches must be a tensor or several tensors, got int$"),
        (lambda: kv_cache.copy_blocks(ONE_PAGE, [0], [1]), ValueError, "^caches must not be an expanded tensor"),
        (lambda: kv_cache.swap_blocks(OTHER, ONE_PAGE, [0], [1]), ValueError, "^dst_cache must not be an expanded"),
        (lambda: kv_cache.copy_blocks(CACHE, 0, [1]), TypeError, "^src_pages must be a list of ints or .*, got int$"),
        (lambda: kv_cache.copy_blocks(torch.zeros(3), [0], [1]), ValueError, r"^caches must have shape .* got \[3\]$"),
        (
            lambda: kv_cache.copy_blocks(CACHE, [0, 1], [2]),
            ValueError,
            r"^dst_pages must have src_pages' length 2",
        ),
        (lambda: kv_cache.copy_blocks(CACHE, [0, 1], [2, 2]), ValueError, "^dst_pages must differ from each other"),
        (lambda: kv_cache.copy_blocks(CACHE, [4], [0]), ValueError, "^src_pages must be pages from 0 to 3, got 4$"),
        (lambda: kv_cache.copy_blocks(CACHE, [0], [-1]), ValueError, "^dst_pages must be pages from 0 to 3, got -1$"),
        (lambda: kv_cache.copy_blocks(CACHE, [0.0], [1]), TypeError, "^src_pages must hold ints, got 0.0$"),
        (lambda: kv_cache.copy_blocks(CACHE, [True], [1]), TypeError, "^src_pages must hold ints, got True$"),
        (lambda: kv_cache.copy_blocks(CACHE, torch.zeros(1), [1]), TypeError, "^src_pages must be .* got float32"),
        (
            lambda: kv_cache.copy_blocks(torch.zeros(2, 1, dtype=torch.complex64), [0], [1]),
            TypeError,
            "^caches must have a real dtype, got complex64$",
        ),
        (lambda: kv_cache.swap_blocks([0], CACHE, [0], [0]), TypeError, "^src_cache must be a tensor, got list$"),
        (lambda: kv_cache.swap_blocks(CACHE, torch.zeros(3), [0], [0]), ValueError, "^dst_cache must have shape"),
        (
            lambda: kv_cache.swap_blocks(CACHE, CACHE.char(), [0], [0]),
            TypeError,
            "^dst_cache must have src_cache's dtype",
        ),
        (lambda: kv_cache.swap_blocks(CACHE, CACHE[:, :2], [0], [0]), ValueError, "^dst_cache must have .* page shape"),
        (
            lambda: kv_cache.swap_blocks(CACHE, CACHE, [0, 1], [1, 2]),
            ValueError,
            "^dst_cache must share no memory with src_cache",
        ),
        (
            lambda: kv_cache.swap_blocks(CACHE.to("meta"), CACHE, [0], [1]),
            ValueError,
            "^dst_cache must be a meta tensor if src_cache is, and only then, got cpu and meta$",
        ),
        (
            lambda: kv_cache.swap_blocks(CACHE, OTHER, [3], [2]),
            ValueError,
            "^dst_pages must be pages from 0 to 1, got 2$",
        ),
        (
            lambda: kv_cache.swap_blocks(OTHER, CACHE, [3], [2]),
            ValueError,
            "^src_pages must be pages from 0 to 1, got 3$",
        ),
    ],
)
def test_page_errors_name_the_argument(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_pages_in_tensors_may_be_copied_in_a_compiled_program():
    cache = torch.arange(12.0).view(3, 4, 1, 1)
    copy = torch.compile(kv_cache.copy_blocks, fullgraph=True, backend="eager")
    copy(cache, torch.tensor([0, 1]), torch.tensor([1, 0]))
    assert cache[:2, :, 0, 0].tolist() == [[4.0, 5.0, 6.0, 7.0], [0.0, 1.0, 2.0, 3.0]]


POSITIONS, TABLE = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 4, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"page_size": 0}, ValueError, "^page_size must be at least 1, got 0$"),
        ({"page_size": 64.0}, TypeError, "^page_size must be an int, got float$"),
        ({"dtype": torch.float32}, TypeError, "^dtype must be int32 or int64, got"),
        ({"block_table": [[0]]}, TypeError, "^block_table must be a tensor, got list$"),
        ({"block_table": TABLE.float()}, TypeError, "^block_table must be int32 or int64, got float32$"),
        ({"block_table": TABLE[0]}, ValueError, r"^block_table must have shape \[b, max_pages\]"),
        ({"positions": [0]}, TypeError, "^positions must be a tensor, got list$"),
        ({"positions": POSITIONS.float()}, TypeError, "^positions must be int32 or int64, got float32$"),
        ({"positions": POSITIONS.to("meta")}, ValueError, "^positions must be on cpu like block_table, got meta$"),
        (
            {"positions": POSITIONS[:1]},
            ValueError,
            r"^positions must have block_table's 2 requests .* got shape \[1, 3\]$",
        ),
        ({"request_ids": [0]}, TypeError, "^request_ids must be a tensor, got list$"),
        ({"request_ids": torch.zeros(3, dtype=torch.int32)}, ValueError, r"^request_ids must have shape \[2\]"),
        ({"request_ids": torch.zeros(2)}, TypeError, "^request_ids must be int32 or int64, got float32$"),
        ({"request_ids": torch.zeros(2, dtype=torch.int32, device="meta")}, ValueError, "^request_ids must be on cpu"),
    ],
)
def test_to_cache_indices_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        kv_cache.to_cache_indices(**({"positions": POSITIONS, "block_table": TABLE, "page_size": 64} | change))
